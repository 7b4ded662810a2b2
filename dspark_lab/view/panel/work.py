"""Long work of a tab, in a thread: how far it is, Stop, and what it made handed back. One piece at a time; the kernel stays free."""

from __future__ import annotations

import contextvars
import html
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets as W

from dspark_lab.errors import LabError
from dspark_lab.runs.spec import Progress
from dspark_lab.trace.progress import Stopped, listening
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.watch import Watch

LARGE_BYTES = 1_000_000
"""Files of so many bytes on disk take about a second to read, and go into the thread."""


class Task:
    """A call in a thread of its own, to be watched as a job is. ``made`` is what it returned, ``error`` what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.made: Any = None
        self.error: Any = None
        self.runs: Any = None
        self._call, self._began, self._stopping = call, time.monotonic(), False
        self._progress = Progress(state="running")
        context = contextvars.copy_context()  # whose cell or click it is
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="dspark-lab-work", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        state = "complete"
        try:
            with listening(self._heard):
                self.made = self._call()
        except Stopped:
            state = "stopped"
        except Exception as e:
            state, self.error = "failed", e
        self._progress = Progress(state=state, fraction=1.0)

    def _heard(self, what: str, fraction: float) -> None:
        if self._stopping:
            raise Stopped
        self._progress = Progress(state="running", fraction=fraction, message=what)

    def poll(self) -> Progress:
        """Where it stands; stopped as soon as it was told to, whatever the thread still finishes for nobody."""
        return Progress(state="stopped") if self._stopping else self._progress

    def stop(self) -> None:
        self._stopping = True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


class Work:
    """The line of a tab with progress and Stop, there while something is worked on."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._watch: Watch | None = None
        self._task: Task | None = None
        self.key: Any = None
        """What is worked on; None: nothing."""
        self.bar = W.FloatProgress(value=0, min=0, max=1, layout=W.Layout(width="160px"))
        self.status = W.HTML(layout=W.Layout(margin="0 8px"))
        self.stop_button = W.Button(
            description="Stop ■", tooltip="leaves it; what was shown stays", layout=W.Layout(width="72px")
        )
        self.stop_button.on_click(guard(lambda _: self.stop()))
        self.widget = W.HBox([self.bar, self.stop_button, self.status], layout=W.Layout(display="none", align_items="center"))  # fmt: skip
        self.widget.add_class("dspark-work")

    @property
    def running(self) -> bool:
        return self._watch is not None and not self._watch.done

    def run(self, key: Any, call: Callable[[], Any], done: Callable[[Any], Any], *, num_bytes: int) -> None:
        """Hands what ``call`` makes to ``done``: at once where the files are small, else when the thread has it.

        ``key`` says what is made: asked for again while it is worked on, nothing begins anew. Anything else takes its place.
        Raises what ``call`` raises, where it was at once.
        """
        if self.running and key == self.key:
            return
        self.leave()
        self.widget.layout.display, self.stop_button.disabled = "none", False
        if num_bytes < LARGE_BYTES:
            done(call())
            return
        self.key, task = key, Task(call)
        self._task = task
        self._say(Progress(state="running", message="beginning"))
        self.widget.layout.display = ""
        self._watch = Watch(task, tick=self._say, end=lambda p: self._ended(task, p, done), broken=self._guard.show)
        self._watch.start()

    def stop(self) -> None:
        """Leaves what is worked on. Raises `LabError` where nothing is."""
        if not self.running:
            raise LabError("nothing is worked on; there is nothing to stop.")
        self.leave()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for what is worked on, and for what its end begins. Raises `LabError` after ``timeout`` seconds."""
        while (watch := self._watch) is not None:
            if not watch.wait(timeout):
                raise LabError(f"the tab still works after {timeout} s; wait longer, or press Stop.")
            if self._watch is watch:
                return

    def leave(self, *, unless: Any = ()) -> None:
        """Leaves what is worked on, if anything; not where its key is ``unless``."""
        if self.key == unless:
            return
        if self._task is not None and self.running:
            self._task.stop()
            assert self._watch is not None
            self._watch.look()  # which ends it

    def _say(self, progress: Progress) -> None:
        if progress.done:
            return
        seconds = self._task.seconds if self._task else 0.0
        whole = progress.fraction >= 1.0
        self.bar.value = progress.fraction
        self.bar.bar_style = "info" if whole else ""
        said = (
            f"{progress.message} …"
            if whole or not progress.fraction
            else f"{progress.message}, {progress.fraction:.0%}"
        )
        self._status(f"{said}, {seconds:.0f} s")

    def _status(self, text: str) -> None:
        self.status.value = f'<div style="font-size:12px;line-height:1.2">{html.escape(text)}</div>'

    def _ended(self, task: Task, progress: Progress, done: Callable[[Any], Any]) -> None:
        self.key, self._task = None, None
        stopped = progress.state == "stopped"
        self.widget.layout.display = "" if stopped else "none"
        self.stop_button.disabled = True
        if stopped:
            self.bar.bar_style = "warning"
            self._status("stopped; what was shown stays")
        elif progress.state == "failed":
            self._guard.show(task.error)
        elif progress.state == "complete":
            done(task.made)
