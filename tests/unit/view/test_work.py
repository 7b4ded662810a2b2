"""Large traces in the panel's tabs: read in a thread, with progress and Stop; what fails is red."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.errors import LabError
from dspark_lab.runs import store
from dspark_lab.trace.progress import Stopped, listening, tell
from dspark_lab.trace.reader import TraceFile
from dspark_lab.view.panel import Panel, panel, work
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.work import Task, Work
from tests.unit.view.conftest import capture


def test_a_listener_hears_where_reading_stands_and_can_end_it(tmp_path: Path) -> None:
    file, heard = TraceFile(capture(tmp_path), chunk_bytes=1000), []
    with listening(lambda what, fraction: heard.append((what, fraction))):
        list(file.runs())
    assert {what for what, _ in heard} == {f"reading {file.path.name}"}
    assert heard[0][1] == 0.0
    assert heard[-1][1] == 1.0
    assert [f for _, f in heard] == sorted(f for _, f in heard)

    def stop(_: str, fraction: float) -> None:
        if fraction > 0.3:
            raise Stopped

    with listening(stop), pytest.raises(Stopped):
        list(file.runs())
    list(file.runs())  # nobody listens any more


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def slow(gate: threading.Event, value: Any = None) -> Callable[[], Any]:
    def call() -> Any:
        tell("reading big.json", 0.25)
        gate.wait(10)
        tell("reading big.json", 0.5)
        if isinstance(value, Exception):
            raise value
        return value

    return call


def test_work_shows_how_far_it_is_and_hands_back(gate: threading.Event) -> None:
    done, w = [], Work(Guard())
    w.run("a", slow(gate, 7), done.append, num_bytes=10**9)
    w.run("a", slow(gate, 8), done.append, num_bytes=10**9)  # the same again: nothing begins anew
    assert w.running
    assert w.widget.layout.display == ""
    gate.set()
    w.wait(10)
    assert done == [7]
    assert w.widget.layout.display == "none"
    w.run("b", slow(gate, 9), done.append, num_bytes=10)
    assert done == [7, 9]  # small: at once


def test_work_is_stopped_or_gives_way(gate: threading.Event) -> None:
    done, w = [], Work(Guard(strict=True))
    w.run("a", slow(gate, 1), done.append, num_bytes=10**9)
    w.run("b", slow(gate, 2), done.append, num_bytes=10**9)  # takes the other's place
    w.stop_button.click()
    assert not w.running
    assert "stopped; what was shown stays" in w.status.value
    gate.set()
    with pytest.raises(LabError, match="nothing is worked on"):
        w.stop()
    w.run("c", slow(gate, 3), done.append, num_bytes=10**9)
    w.wait(10)
    assert done == [3]


def test_what_fails_in_the_thread_is_red(gate: threading.Event) -> None:
    guard = Guard()
    w = Work(guard)
    gate.set()
    w.run("a", slow(gate, LabError("big.json is no trace")), print, num_bytes=10**9)
    w.wait(10)
    assert "big.json is no trace" in guard.widget.value
    assert not w.running
    w.run("b", slow(gate, 1), lambda _: 1 / 0, num_bytes=10**9)
    w.wait(10)
    assert "ZeroDivisionError" in guard.widget.value


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Panel:
    """A panel to which every file is large."""
    monkeypatch.setattr(work, "LARGE_BYTES", 0)
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path / "data")
    return panel(source="live")


def test_tabs_read_large_files_in_a_thread(large: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(work, "Task", lambda call: begun.append(call) or Task(call))
    paths = {arm: str(capture(tmp_path, blocking=arm == "blocking")) for arm in ("none", "blocking")}
    tabs: dict[str, Any] = {name: large._tabs[name] for name in ("Trace file", "Diff", "What-if")}
    tabs["Trace file"].choice.value = paths["blocking"]
    tabs["Diff"].before.value, tabs["Diff"].after.value = paths["none"], paths["blocking"]
    tabs["What-if"].choice.value = paths["blocking"]
    assert len(begun) == 3
    large.wait(30)
    assert len(begun) == 4  # the edit chosen, once What-if has replayed the trace
    assert "cudaStreamSynchronize" in tabs["Trace file"].summary.value
    assert tabs["Diff"].text.value == tabs["Diff"].diff.sentence
    assert len(tabs["What-if"].best.edits)
    assert "replay of the unedited trace" in tabs["What-if"].said.value
    tabs["Diff"].fold.selected_index = 0
    large.wait(30)
    assert len(tabs["Diff"].stage.figure.scene.groups) == 2
    (tmp_path / "notes.json").write_text("{}")
    tabs["Trace file"].choice.value = str(tmp_path / "notes.json")
    large.wait(30)
    assert "notes.json is no trace" in str(large.errors[-1])
    assert "cudaStreamSynchronize" in tabs["Trace file"].summary.value  # the last good picture stays
