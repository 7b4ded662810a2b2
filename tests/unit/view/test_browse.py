"""The timeline to zoom in: rows, one clock, what a zoom, a search and a click give, and the still picture beside it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ipywidgets as W
import numpy as np
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError
from dspark_lab.trace import open_trace
from dspark_lab.view.browse import wire
from dspark_lab.view.browse.canvas import Browse, browse
from dspark_lab.view.browse.detail import Row, look
from dspark_lab.view.browse.scene import scene
from dspark_lab.view.browse.tracks import CODE
from tests.unit.view.conftest import capture

KINDS = ["steps, host", "thread 1 calls", "graph replays", "stream 7"]


def track(b: Browse, label: str, group: int = 0) -> int:
    return next(i for i, t in enumerate(b.scene.tracks) if t.label == label and t.group == group)


def test_rows_are_threads_graphs_and_streams(traces: dict[str, Any]) -> None:
    of = scene({"": traces["blocking"]})
    assert [t.label for t in of.tracks] == KINDS
    assert of.lo == 0
    calls, replays = of.tracks[1].row, of.tracks[2].row
    assert (calls.colour == CODE["wait"]).sum() == 6
    assert sorted(set(replays.colour.tolist())) == [CODE["draft"], CODE["verify"]]
    assert len(of.flags) == 6
    assert "cudaStreamSynchronize (sync, step 0)" in of.flags["text"][0]


def test_real_captures_have_ops_over_their_calls(h200: Path) -> None:
    of = scene({"": open_trace(h200 / "trace_none.json.gz")})
    assert [t.kind for t in of.tracks] == ["steps", "ops", "calls", "graphs", "stream"]
    ops = of.tracks[1].row
    assert (np.diff(ops.reach) > 0).all()  # the outermost only
    assert len(of.tracks[2].row) == len(of.groups[0].trace.runtime())


def test_arrows_go_from_the_launch_to_its_first_event(traces: dict[str, Any]) -> None:
    of = scene({"": traces["none"]})
    rows = traces["none"].launches()
    assert len(of.arrows) == len(rows)
    zero = of.groups[0].zero_ns
    assert (of.arrows[:, 0] + zero == np.rint(rows["ts_ns"] + rows["dur_us"] * 1e3)).all()
    assert (of.arrows[:, 2] + zero == rows["device_start_ns"]).all()
    assert set(of.arrows[:, 1]) == {1}
    assert set(of.arrows[:, 3]) == {3}


def test_two_traces_are_aligned_where_a_step_begins(traces: dict[str, Any]) -> None:
    of = scene(traces, step=3)
    assert [g.name for g in of.groups] == ["none", "blocking"]
    starts = of.steps[of.steps["step"] == 3]
    assert starts["at"].tolist() == [0, 0]
    assert "step 3" in of.note
    with pytest.raises(LabError, match="step=99 is not in none, which has steps 0 to 5"):
        scene(traces, step=99)
    assert "step 2" in scene(traces).note  # the third common one


def test_ranks_lie_on_one_clock_and_it_says_how_sure() -> None:
    of = browse(lab.load_run("h200-tp2-blocking"))
    assert [g.name for g in of.scene.groups] == ["rank 0", "rank 1"]
    assert "by their collectives, to ±0." in of.scene.note
    first = [t.row for t in of.scene.tracks if t.kind == "stream"]
    ends = [r.end[r.colour == CODE["communication"]] for r in first]
    assert np.median(np.abs(ends[0] - ends[1])) < 2_000  # collectives end together


def test_a_zoom_brings_detail(tmp_path: Path) -> None:
    b = browse(capture(tmp_path, steps=40, kernels=400))
    b.zoom(b.scene.lo / 1e6, b.scene.hi / 1e6)
    far, size = b.boxes, b.view_bytes
    near = b.zoom(10.24, 10.30)
    assert far.merged.sum() > 300
    assert far.count.sum() == b.scene.num_events
    assert near.merged.sum() == 0
    assert 20 < len(near) < 1000
    assert max(size, b.view_bytes) < 200_000
    assert b.widget.view["lo"] == 10_240_000
    assert b.zoom_steps(3, 4).count.sum() > 0
    assert b.lo_ns < 3_000_000 < b.hi_ns


def test_a_view_of_a_million_events_stays_under_a_megabyte(traces: dict[str, Any]) -> None:
    of = scene({"": traces["none"]})
    start = np.arange(1_000_000) * 1000
    big = Row(start, start + 600, np.arange(1_000_000) % 3, np.arange(1_000_000) % 500)
    many = replace(
        of,
        tracks=tuple(replace(of.tracks[3], row=big) for _ in range(12)),
        names=np.array(["k" * 60] * 500, dtype=object),
    )
    for hi in (10**9, 10**7, 10**6):
        boxes, cell = look([t.row for t in many.tracks], 0, hi, pixels=2500)
        assert len(boxes) > 5000
        assert wire.num_bytes(wire.view(many, boxes, 0, hi, cell=cell, jump=0)) < 1_000_000


def test_search_counts_marks_and_goes_on(traces: dict[str, Any]) -> None:
    b = browse(traces["none"])
    kernels = traces["none"].kernels()
    assert b.search("NCCL") == kernels["name"].str.contains("nccl").sum() == 12
    assert b.boxes.hit.sum() > 0
    first = b.next()
    assert first is not None
    assert "ncclDevKernel_AllReduce" in first.title
    seen = [b.next() for _ in range(12)]
    assert [p.facts["at"] for p in seen if p][-1] == first.facts["at"]  # round to where it began
    assert b.search("no such kernel") == 0
    assert b.next() is None
    assert b.search("") == 0
    assert b.boxes.hit.sum() == 0


def test_a_click_tells_the_event_and_its_launcher(h200: Path) -> None:
    b = browse(h200 / "one_bs1_hw0_blocking_stack_rank0.json.gz")
    stream, calls = track(b, "stream 7"), next(i for i, t in enumerate(b.scene.tracks) if t.kind == "calls")
    row = b.scene.tracks[stream].row
    at = int(np.flatnonzero((row.start > b.lo_ns) & (row.end - row.start > 20_000))[0])
    b.zoom(row.start[at] / 1e6 - 0.05, row.end[at] / 1e6 + 0.05)
    picked = b.pick(stream, int(row.start[at] + 1))
    assert picked is not None
    assert picked.event == at
    assert "cudaGraphLaunch" in picked.launcher
    assert "step" in picked.facts
    assert picked.arrow is not None
    assert picked.arrow[1] == calls
    assert "Python" in picked.launcher
    wait = b.scene.flags[b.scene.flags["dur"] > 1_000_000].iloc[1]
    b.zoom(wait["at"] / 1e6 - 0.1, (wait["at"] + wait["dur"]) / 1e6)
    held = b.pick(calls, int(wait["at"] + wait["dur"] // 2))
    assert held is not None
    assert held.facts["host waits"] == "sync"
    assert held.facts["site"] == "<string>:64 alloc"
    assert b.pick(calls, -(10**9)) is None


def test_a_click_on_what_is_merged_tells_what_it_is_made_of(tmp_path: Path) -> None:
    b = browse(capture(tmp_path, steps=40, kernels=400))
    b.zoom(0, 40)
    stream = track(b, "stream 7")
    box = int(np.flatnonzero((b.boxes.row == stream) & b.boxes.merged)[5])
    picked = b.pick(stream, int(b.boxes.start[box]) + 1)
    assert picked is not None
    assert picked.title.startswith(f"{b.boxes.count[box]} events merged here")
    assert "gemm_kernel" in picked.text
    assert f"{b.boxes.share[box]:.0%}" == picked.facts["busy"]


def test_messages_of_the_browser(traces: dict[str, Any]) -> None:
    b = browse(traces["none"])
    b._heard({"do": "zoom", "lo": 0, "hi": 2_000_000, "width": 700})
    assert (b.lo_ns, b.hi_ns) == (0, 2_000_000)
    assert not b.widget.error
    b._heard({"do": "search", "text": "nccl"})
    assert b.widget.found == {"text": "nccl", "count": 12, "at": -1}
    b._heard({"do": "next", "way": 1})
    assert "ncclDevKernel" in b.widget.picked["html"]
    b._heard({"do": "dance"})
    assert "does not know 'dance'" in b.widget.error
    b._heard({"do": "zoom"})
    assert "KeyError" in b.widget.error


def test_doubts_and_bands_go_to_the_picture(hostile: Path) -> None:
    b = browse(hostile / "step_collapse")
    group = b.widget.scene["groups"][0]
    assert group["doubts"][0].startswith("not given: ")
    assert [w for _, _, w in group["bands"]][1] == "step 6: no device events"
    assert "no device events" in b.svg
    assert "⚠" in b.svg
    assert browse(hostile / "ok").widget.scene["groups"][0] == {"name": "rank 0", "doubts": [], "bands": []}


@pytest.mark.parametrize("case", ["nosteps", "trunc", "overrun", "hugedur", "two"])
def test_any_file_can_be_browsed(hostile: Path, case: str) -> None:
    b = browse(hostile / case)
    b.zoom(b.scene.lo / 1e6, b.scene.hi / 1e6)
    for i, t in enumerate(b.scene.tracks):
        assert b.pick(i, int(t.row.start[0]), slack_ns=1) is not None
    ElementTree.fromstring(b.svg)


def test_bad_values(traces: dict[str, Any], hostile: Path, tmp_path: Path) -> None:
    b = browse(traces["none"])
    with pytest.raises(LabError, match="no range of times"):
        b.zoom(5, 5)
    with pytest.raises(LabError, match="steps 0 to 5"):
        browse(traces["none"], steps=slice(90, 92))
    with pytest.raises(LabError, match="stride"):
        browse(traces["none"], steps=slice(0, 4, 2))
    with pytest.raises(LabError, match="no step number"):
        browse(traces["none"], step="2")  # type: ignore[arg-type]
    assert browse(traces["none"], steps=3).lo_ns == browse(traces["none"], steps=slice(3, 4)).lo_ns
    with pytest.raises(LabError, match="no events with a duration"):
        browse(hostile / "metaonly")
    for nothing in ({}, []):
        with pytest.raises(LabError, match="nothing to browse"):
            browse(nothing)
    with pytest.raises(LabError):
        browse(tmp_path / "absent.json")
    with pytest.raises(LabError, match="no name of a trace"):
        browse({1: traces["none"]})


def test_the_still_picture_is_small_and_needs_nothing(h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = browse([h200 / "trace_none.json.gz", h200 / "trace_blocking.json.gz"])
    root = ElementTree.fromstring(b.svg)
    assert root.tag.endswith("svg")
    assert len(b.svg) < 250_000
    assert "<script" not in b.svg
    assert "http" not in b.svg.replace("http://www.w3.org/2000/svg", "")
    assert "trace_blocking" in b.svg
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: shown.append(what))
    b._ipython_display_()
    assert shown[0] is b.widget
    assert set(shown[1]) == {"text/html", "text/plain"}
    assert shown[1]["text/html"].startswith('<img class="dspark-still" alt="Browse(')
    assert len(shown[1]["text/html"]) < 300_000


def test_without_anywidget_the_still_picture_stands_alone(
    traces: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark_lab.view.browse import canvas

    canvas._canvas.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    b = browse(traces["none"])
    assert isinstance(b.widget, W.HTML)
    assert b.widget.value.startswith("<svg")
    before = b.widget.value
    b.zoom(0, 1)
    assert b.widget.value != before
    assert b.search("nccl") == 12
    assert b.next() is not None
    monkeypatch.undo()
    canvas._canvas.cache_clear()
