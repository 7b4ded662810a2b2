"""JSON for Perfetto: nothing overlaps, flows bind, the figures survive, and the checker sees what is wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_lab.errors import LabError
from dspark_lab.export.lanes import apart, nested
from dspark_lab.export.perfetto import to_perfetto
from dspark_lab.export.perfetto_check import check_perfetto
from dspark_lab.trace import open_trace, summarize

KEPT = (
    "num_steps",
    "step_us_p50",
    "step_us_mean",
    "kernels_per_step",
    "launch_lead_us_p50",
    "host_wait_us_p50",
    "waits",
)


@pytest.mark.parametrize("name", ["trace_blocking", "one_bs1_hw0_blocking_stack_rank0"])
def test_figures_survive(h200: Path, tmp_path: Path, name: str) -> None:
    before = open_trace(h200 / f"{name}.json.gz")
    made = to_perfetto(before, tmp_path / "out.json.gz")
    after = open_trace(made.path)
    was, now = summarize(before), summarize(after)
    assert {k: now[k] for k in KEPT} == {k: was[k] for k in KEPT}
    assert len(after.device_events()) == len(before.device_events())
    assert after.steps()["host_start_ns"].tolist() == before.steps()["host_start_ns"].tolist()
    assert (made.num_flows, made.steps) == (18 * 8, (0, 7))


def test_every_hostile_case_is_written_clean(hostile: Path, tmp_path: Path) -> None:
    written = 0
    for case in sorted(hostile.iterdir()):
        if case.name in ("same_rank_twice", "metaonly"):
            with pytest.raises(LabError):
                to_perfetto(case, tmp_path / "no.json")
            continue
        made = to_perfetto(case, tmp_path / f"{case.name}.json")
        assert check_perfetto(made.path).problems == ()
        written += 1
    assert written >= 17


def test_steps_and_windows(h200: Path, tmp_path: Path) -> None:
    trace = open_trace(h200 / "trace_none.json.gz")
    whole = to_perfetto(trace, tmp_path / "all.json")
    two = to_perfetto(trace, tmp_path / "two.json", steps=slice(2, 4))
    assert (two.steps, two.num_flows) == ((2, 3), 2 * 17)
    assert two.num_slices < whole.num_slices / 3
    again = open_trace(two.path)
    assert again.steps()["num_kernels"].tolist() == [588, 588]
    assert again.steps()["period_us"].iloc[0] == trace.steps()["period_us"].iloc[2]
    assert to_perfetto(trace, tmp_path / "one.json", steps=3).steps == (3, 3)
    assert to_perfetto(trace, tmp_path / "t.json", window_us=(10_000, 12_000)).num_slices > 100
    for wrong, said in (
        ({"steps": 99}, "0 to 7"),
        ({"window_us": (5, 1)}, "from < to"),
        ({"steps": 1, "window_us": (0, 1)}, "not both"),
    ):
        with pytest.raises(LabError, match=said):
            to_perfetto(trace, tmp_path / "no.json", **wrong)
    assert not (tmp_path / "no.json").exists()


def test_size_has_a_limit_of_whole_steps(h200: Path, tmp_path: Path) -> None:
    trace = open_trace(h200 / "trace_none.json.gz")
    made = to_perfetto(trace, tmp_path / "out.json", max_mb=1.0)
    assert made.size_mb <= 1.0
    assert made.path.stat().st_size <= 1_000_000
    assert made.steps == (0, 1)
    assert "steps after 1 are left out" in made.messages[0]
    with pytest.raises(LabError, match="not even one step"):
        to_perfetto(trace, tmp_path / "no.json", max_mb=0.01)
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_content_follows_the_suffix(h200: Path, tmp_path: Path) -> None:
    trace = open_trace(h200 / "tp2_bs1_hw0_none_rank0.json.gz")
    assert to_perfetto(trace, tmp_path / "a.json").path.read_bytes()[:1] == b"{"
    assert to_perfetto(trace, tmp_path / "a.json.gz").path.read_bytes()[:2] == b"\x1f\x8b"
    (tmp_path / "wrong.json").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    assert "gzip" in check_perfetto(tmp_path / "wrong.json").problems[0]


def test_ranks_have_processes_of_their_own(hostile: Path, h200: Path, tmp_path: Path) -> None:
    made = to_perfetto(hostile / "two", tmp_path / "two.json")  # both files: pid 100 and 0, the same correlation ids
    events = json.loads(made.path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert {e["pid"] for e in kernels} == {1500, 2500}
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0 host 100", "rank 0 GPU 0", "rank 1 host 100", "rank 1 GPU 0"}
    assert "clocks are as recorded" in made.messages[0]
    for rank in (0, 1):
        (tmp_path / "tp2").mkdir(exist_ok=True)
        (tmp_path / "tp2" / f"x_rank{rank}.json.gz").write_bytes(
            (h200 / f"tp2_bs1_hw0_none_rank{rank}.json.gz").read_bytes()
        )
    made = to_perfetto(tmp_path / "tp2", tmp_path / "tp2.json")
    assert "known to ± " in made.messages[0]


def test_overlaps_are_cut_or_moved(made: Any, write: Callable[..., Path], tmp_path: Path) -> None:
    trace = made().mark("ProfilerStep#0", 0, 100)
    trace.span("python_function", "outer", 10, 10.0).span("cpu_op", "by a nanosecond", 15, 5.001)
    trace.span("cpu_op", "far beyond", 18, 30)
    launch = trace.call("GraphLaunch", 60, 5)
    trace.device("branch a", 70, 10, launch).device("branch b", 78, 5, launch).device(
        "swallows", 90, 40, launch
    ).device("next", 95, 3, launch)
    written = to_perfetto(write(trace.content()), tmp_path / "out.json")
    events = json.loads(written.path.read_text())["traceEvents"]
    at = {e["name"]: e for e in events if e["ph"] == "X"}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert at["by a nanosecond"]["dur"] == 5.0
    assert at["by a nanosecond"]["args"]["recorded_dur_us"] == 5.001
    assert tracks[at["far beyond"]["tid"]].endswith("(2)")
    assert {tracks[at[n]["tid"]] for n in ("branch a", "swallows", "next")} == {"stream 7"}
    assert tracks[at["branch b"]["tid"]] == "stream 7 (2)"
    assert at["swallows"]["dur"] == 5.0
    assert written.num_cut == 2


BASE = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 10}
STREAM = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "stream 7"}}
BEGIN, END = (
    {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 5},
    {"ph": "f", "bp": "e", "id": 1, "pid": 1, "tid": 1, "ts": 6},
)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([BASE, BASE | {"name": "b", "ts": 5, "dur": 5.001}], "'b' at 5000 ns outlasts 'a'"),
        ([STREAM, BASE, BASE | {"name": "b", "ts": 5, "dur": 2}], "runs while"),
        ([BASE | {"dur": -1}], "dur -1"),
        ([BASE | {"ts": "0"}], "no sound place"),
        ([{k: v for k, v in BASE.items() if k != "dur"}], "dur none"),
        ([BASE, BEGIN], "not one begin and one end"),
        ([BASE, BEGIN, END, END], "not one begin and one end"),
        ([BASE, BEGIN | {"ts": 7}, END], "backwards"),
        ([BASE, BEGIN, END | {"ts": 11}], "outside every slice"),
        ([BASE | {"ph": "B"}], "'B'"),
        ([BASE | {"ts": 0.0001}], "no sound place"),
    ],
)
def test_the_checker_sees(write: Callable[..., Path], events: list[dict[str, Any]], said: str) -> None:
    assert said in check_perfetto(write({"traceEvents": events})).problems[0]


def test_the_checker_passes_what_is_sound(write: Callable[..., Path]) -> None:
    found = check_perfetto(
        write({"traceEvents": [BASE, BASE | {"name": "b", "ts": 5, "dur": 5}, BASE | {"ts": 10}, BEGIN, END]})
    )
    assert (found.num_slices, found.num_flows, found.problems) == (3, 1, ())
    assert "no strict trace JSON" in check_perfetto(write('{"traceEvents": [{"ph": "X", "ts": NaN}]}')).problems[0]


def test_lanes() -> None:
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 400, 300))
    end = start + rng.integers(0, 60, 300)
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    lane = apart(start, end)
    for k in range(lane.max() + 1):
        own = np.flatnonzero(lane == k)
        assert (start[own][1:] >= end[own][:-1]).all()
    lane, cut = nested(start, end, slack=3)
    assert (end - cut <= 3).all()
    for k in range(lane.max() + 1):
        own = np.flatnonzero(lane == k)
        for i in own:
            around = own[(start[own] < start[i]) & (cut[own] > start[i])]
            assert (cut[around] >= cut[i]).all()
