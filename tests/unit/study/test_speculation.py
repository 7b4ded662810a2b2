"""Speculation against none: by hand on made steps, and live."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.config import LabConfig, preset
from dspark_lab.runs.record import Acceptance, Run


def made(cfg: LabConfig, step_us: float, accepted: tuple[int, ...], name: str) -> Run:
    """Two processes of ten equal steps, of which each commits the mean."""
    mean = Acceptance(accepted=accepted, proposed=accepted).accept_length
    steps = pd.DataFrame(
        {"process": np.repeat([0, 1], 10), "repeat": 0, "step": [*range(10)] * 2, "rank": 0, "profiled": False,
         "step_us": step_us, "host_us": step_us, "num_requests": 1, "num_committed": mean}
    )  # fmt: skip
    return Run(name=name, config=cfg, source="measured", steps=steps, environment={"device": "cpu"},
               acceptance=Acceptance(accepted=accepted, proposed=accepted))  # fmt: skip


def test_by_hand() -> None:
    cfg = preset("tiny", batch_size=1)
    runs = [
        made(cfg, 2000.0, (0, 0, 5, 5, 0, 0), "drafts"),
        made(cfg.replace(speculate=False), 1000.0, (10,), "plain"),
    ]
    row = lab.speculation(runs).iloc[0]
    assert row["accept_length"] == pytest.approx(3.5)
    assert row["break_even"] == pytest.approx(2.0)
    assert row["speedup"] == row["expected"] == pytest.approx(1.75)
    assert row["plain_tokens_per_s"] == pytest.approx(1000.0)
    with pytest.raises(lab.LabError, match=r"speculate=\[True, False\]"):
        lab.speculation([runs[0], replace(runs[1], config=cfg.replace(speculate=False, batch_size=2))])


def test_a_run_has_one_twin() -> None:
    """Without drafts every strategy is one path; the row is beside the run of its own."""
    cfg = preset("tiny", batch_size=1)
    runs = [
        made(cfg.replace(speculate=speculate, alloc=alloc), us, accepted, f"{speculate}-{alloc}")
        for alloc, us in (("none", 1000.0), ("blocking", 3000.0))
        for speculate, accepted in ((True, (0, 0, 5, 5, 0, 0)), (False, (10,)))
    ]
    table = lab.speculation(runs)
    assert list(table["name"]) == ["True-none", "True-blocking"]
    assert list(table["plain_ms"]) == [1.0, 3.0]


def test_live_arms_share_models_and_names_tell_them_apart(tmp_path) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2)
    runs = lab.sweep(
        cfg, speculate=[True, False], num_steps=12, repeats=1, processes=1, profile_steps=0, out=tmp_path / "runs"
    )
    assert {r.name for r in runs if r.role == "arm"} == {"tiny-ep1-bs2-on_demand", "tiny-ep1-bs2-plain-on_demand"}
    row = lab.speculation(runs).iloc[0]
    assert 1.0 < row["accept_length"] < 6.0
    assert row["expected"] == pytest.approx(row["accept_length"] / row["break_even"])
