"""Several ranks: clocks, stragglers, one clock for all, an edit on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_lab.analysis.ranks import merged, ranks
from dspark_lab.analysis.whatif import whatif
from dspark_lab.errors import LabError
from dspark_lab.trace import TraceSet, open_trace

SHIFT_US = 11_560_000.0


def job(
    made: Any,
    write: Callable[..., Path],
    *,
    late_us: float = 0.0,
    shift_us: float = 0.0,
    pitch_us: float = 1000.0,
    host_us: float = 1000.0,
) -> Path:
    """Two ranks of six steps: a kernel, an all-reduce that ends on both at once. Rank 1's kernel is ``late_us`` longer, its clock off; the
    host begins a step every ``host_us``, the device every ``pitch_us``."""
    for rank in (0, 1):
        trace = made(distributedInfo={"rank": rank, "world_size": 2})
        zero = shift_us if rank else 0.0
        for step in range(6):
            t = zero + pitch_us * step
            h = zero + host_us * step
            trace.mark(f"ProfilerStep#{step}", h, 0.9 * host_us)
            own = 300.0 + (late_us if rank else 0.0)
            trace.device("gemm", t + 50, own, trace.call("LaunchKernel", h + 5, 10))
            begin = t + 50 + own + 2
            end = t + 50 + 300 + late_us + 2 + 40
            trace.device("ncclDevKernel_AllReduce_Sum", begin, end - begin, trace.call("LaunchKernel", h + 20, 10))
        path = write(trace.content(), f"job/rank{rank}.json")
    return path.parent


def test_the_straggler_and_the_wait_it_causes(made: Any, write: Callable[..., Path]) -> None:
    found = ranks(job(made, write, late_us=100.0))
    table = found.ranks.set_index("rank")
    assert table["caused_us_per_step"].tolist() == [0.0, 100.0]
    assert table["waited_us_per_step"].tolist() == [100.0, 0.0]
    assert table["num_last"].tolist() == [0, 6]
    assert found.steps["straggler"].tolist() == [1] * 6
    assert found.collectives["skew_us"].tolist() == pytest.approx([100.0] * 6)
    assert found.sentence.startswith("Rank 1 holds the others up in 6 of 6 steps: they wait 100.0 µs a step")
    assert "straggler" in found._repr_html_()


def test_even_ranks_have_none(made: Any, write: Callable[..., Path]) -> None:
    found = ranks(job(made, write))
    assert found.sentence.startswith("No straggler")
    assert set(found.collectives["last_rank"]) == {-1}
    assert set(found.steps["straggler"]) == {-1}


def test_a_shifted_clock_changes_nothing(made: Any, write: Callable[..., Path]) -> None:
    found = ranks(job(made, write, late_us=100.0, shift_us=SHIFT_US))
    table = found.ranks.set_index("rank")
    assert table["offset_us"].tolist() == [0.0, SHIFT_US]
    assert table["uncertainty_us"].tolist() == [0.0, 0.0]
    assert found.collectives["skew_us"].tolist() == pytest.approx([100.0] * 6)
    assert table["caused_us_per_step"].tolist() == [0.0, 100.0]


def test_merged_is_on_one_clock(made: Any, write: Callable[..., Path]) -> None:
    folder = job(made, write, late_us=100.0, shift_us=SHIFT_US)
    table = merged(folder)
    opened = open_trace(folder)
    assert isinstance(opened, TraceSet)
    assert len(table) == sum(len(t.events) for t in opened.values())
    assert table["ts_ns"].is_monotonic_increasing
    ends = (
        table[table["name"] == "ncclDevKernel_AllReduce_Sum"]
        .assign(end=lambda d: d["ts_ns"] + d["dur_ns"])
        .groupby("rank")["end"]
        .apply(list)
    )
    assert ends[0] == ends[1]
    assert table.attrs["offset_us"] == {0: 0.0, 1: SHIFT_US}


def test_an_edit_on_the_straggler_alone(made: Any, write: Callable[..., Path]) -> None:
    folder = job(made, write, late_us=600.0, pitch_us=950.0, host_us=100.0)
    both = whatif(folder, scale_kernel={"gemm": 0.5}, num_edits=0)
    one = whatif(folder, scale_kernel={"gemm": 0.5}, ranks=[1], num_edits=0)
    other = whatif(folder, scale_kernel={"gemm": 0.5}, ranks=[0], num_edits=0)
    assert both.predicted_us <= one.predicted_us < other.predicted_us
    assert other.gain_us == pytest.approx(0.0, abs=1.0)
    assert "on rank 1" in one.sentence
    with pytest.raises(LabError, match="ranks=7"):
        whatif(folder, ranks=[7])


def test_recorded_pair(h200: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json.gz").write_bytes((h200 / f"tp2_bs1_hw0_none_rank{rank}.json.gz").read_bytes())
    found = ranks(tmp_path)
    assert found.ranks["uncertainty_us"].max() < 1.0
    assert found.ranks["offset_us"].abs().max() < 5.0
    assert len(found.collectives) == 240
    assert found.steps["caused_us"].iloc[0] > 200_000, "rank 0 began its capture 0.2 s before rank 1"
    assert found.ranks["caused_us_per_step"].max() < 50, "a median is not led astray by it"


def test_ranks_of_two_captures_are_not_taken_for_one(h200: Path, tmp_path: Path) -> None:
    for arm, rank in (("blocking", 0), ("none", 1)):
        (tmp_path / f"rank{rank}.json.gz").write_bytes((h200 / f"tp2_bs1_hw0_{arm}_rank{rank}.json.gz").read_bytes())
    assert "not ranks of one capture" in ranks(tmp_path).sentence
    found = whatif(tmp_path, num_edits=0)
    assert not found.exact
    assert "not ranks of one capture" in found.sentence


def test_what_cannot_be(made: Any, write: Callable[..., Path], hostile: Path, h200: Path) -> None:
    with pytest.raises(LabError, match="no collectives in common"):
        ranks(hostile / "two")
    for verb in (ranks, merged):
        with pytest.raises(LabError, match="holds one rank"):
            verb(h200 / "trace_none.json.gz")
    assert np.isnan(merged(hostile / "two").attrs["uncertainty_us"][1])
