"""`compare`: known differences come out with their sign, noise comes out as a tie, and a CPU has nothing to compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dspark_lab.analysis.intervals import paired_delta, t_interval
from dspark_lab.analysis.latency import compare
from dspark_lab.errors import LabError
from dspark_lab.runs.record import STEP_COLUMNS, Run


@pytest.fixture
def measured(make_run):
    """A GPU run of 5 processes × 2 blocks × 40 noisy steps around ``step_us``; blocks drift together, as a machine does."""

    def make(
        step_us: float, seed: int, *, role: str = "arm", device: str = "cuda", name: str = "r", **toggles: Any
    ) -> Run:
        rng, drift = np.random.default_rng(seed), np.random.default_rng(7).normal(0, 0.01, (5, 2))
        rows = [
            {"process": p, "repeat": r, "step": s, "rank": 0, "profiled": False, "host_us": 1.0, "num_requests": 1, "num_committed": 4,
             "step_us": step_us * (1 + drift[p, r]) * (1 + rng.normal(0, 0.004))}
            for p in range(5) for r in range(2) for s in range(40)
        ]  # fmt: skip
        base = make_run(name=name, role=role, **toggles)
        env = {"device": device, "device_name": "a GPU"}
        return replace(base, steps=pd.DataFrame(rows).astype(STEP_COLUMNS), environment=env)

    return make


def test_a_real_difference_gets_its_sign_and_an_interval_that_holds_it(measured) -> None:
    runs = [measured(1000, 1, alloc="none"), measured(1022, 2, alloc="blocking"), measured(985, 3, alloc="non_blocking"),
            measured(1000, 4, alloc="none", role="aa")]  # fmt: skip
    table = compare(runs).set_index("alloc")
    assert table["verdict"].to_dict() == {"none": "baseline", "blocking": "slower", "non_blocking": "faster"}
    low, high = table.loc["blocking", "delta_pct_ci95"]
    assert low < 2.2 < high
    assert high - low < 1.0  # paired: the common drift of 1 % cancels
    assert table.loc["blocking", "reason"] == "interval over 5 processes"


def test_noise_is_a_tie(measured) -> None:
    runs = [
        measured(1000, 1, alloc="none"),
        measured(1000, 2, alloc="blocking"),
        measured(1000, 3, alloc="none", role="aa"),
    ]
    assert compare(runs).set_index("alloc").loc["blocking", "verdict"] == "tie"


def test_a_difference_inside_the_floor_is_a_tie(measured) -> None:
    runs = [
        measured(1000, 1, alloc="none"),
        measured(1010, 2, alloc="blocking"),
        measured(1030, 3, alloc="none", role="aa"),
    ]
    row = compare(runs).set_index("alloc").loc["blocking"]
    assert row["verdict"] == "tie"
    assert "A/A floor" in row["reason"]


def test_on_a_cpu_strategies_tie_and_the_reason_is_said(measured) -> None:
    runs = [measured(1000, 1, alloc="none", device="cpu"), measured(2000, 2, alloc="blocking", device="cpu")]
    row = compare(runs).set_index("alloc").loc["blocking"]
    assert (row["verdict"], row["reason"][:6]) == ("tie", "no GPU")


def test_other_toggles_are_compared_on_a_cpu_too(measured) -> None:
    runs = [measured(1000, 1, batch_size=1, device="cpu"), measured(2000, 2, batch_size=8, device="cpu")]
    table = compare(runs, by="batch_size").set_index("batch_size")
    assert table["verdict"].to_dict() == {1: "baseline", 8: "slower"}


def test_runs_are_compared_within_equal_toggles_only(measured) -> None:
    runs = [measured(1000, 1, alloc="none", batch_size=1), measured(1020, 2, alloc="blocking", batch_size=1),
            measured(3000, 3, alloc="none", batch_size=8), measured(3000, 4, alloc="blocking", batch_size=8)]  # fmt: skip
    table = compare(runs)
    assert list(table["verdict"]) == ["baseline", "slower", "baseline", "tie"]


def test_the_same_path_is_a_tie_without_arithmetic(measured) -> None:
    none = measured(1000, 1, alloc="none")
    alias = replace(measured(1300, 2, alloc="on_demand"), same_path_as="none")
    row = compare([none, alias]).set_index("alloc").loc["on_demand"]
    assert (row["verdict"], row["same_path_as"]) == ("tie", "none")


def test_baseline_can_be_named_and_a_wrong_one_is_refused(measured) -> None:
    runs = [measured(1000, 1, alloc="none"), measured(1022, 2, alloc="blocking")]
    assert compare(runs, baseline="blocking").set_index("alloc")["verdict"].to_dict() == {
        "none": "faster",
        "blocking": "baseline",
    }
    with pytest.raises(LabError, match="baseline='pinned'"):
        compare(runs, baseline="pinned")
    with pytest.raises(LabError, match="Did you mean 'alloc'"):
        compare(runs, by="aloc")
    with pytest.raises(LabError, match="no runs"):
        compare([])


def test_quoted_medians_have_no_interval_and_a_floor(make_run) -> None:
    def quoted(ms: float, alloc: str) -> Run:
        run = make_run(profiled=True, alloc=alloc)
        env = {"device": "cuda", "device_name": "a GPU"}
        return replace(run, quoted={"step_ms_p50": ms, "floor_pct": 1.0}, environment=env)

    table = compare([quoted(3.285, "none"), quoted(3.357, "blocking"), quoted(3.263, "non_blocking")]).set_index(
        "alloc"
    )
    assert table["verdict"].to_dict() == {"none": "baseline", "blocking": "slower", "non_blocking": "tie"}
    assert table.loc["blocking", "delta_pct"] == pytest.approx(2.19, abs=0.01)
    assert table.loc["blocking", "delta_pct_ci95"] is None
    assert table.loc["blocking", "step_ms_p50"] == 3.357


def test_interval_covers_at_its_rate() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        i = t_interval(rng.normal(1.0, 0.3, 5))
        hits += i.low <= 1.0 <= i.high
    assert 0.93 < hits / 2000 < 0.97


def test_one_block_has_no_interval(make_run) -> None:
    delta = paired_delta(make_run(num_repeats=1, step_us=1100), make_run(num_repeats=1))
    assert not delta.known
    assert delta.mean > 0
