"""`live_training`: a training in a thread, with its curves as they come, Stop, and Go on; the kernel stays free."""

from __future__ import annotations

import contextvars
import html
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import ipywidgets as W
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.errors import LabError
from dspark_lab.runs.spec import Progress
from dspark_lab.view.curves import training_curves
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.picture import Picture
from dspark_lab.view.panel.turn import in_turn
from dspark_lab.view.panel.watch import Watch

HERE = "measured on this machine"
EVERY_S = 0.5
"""How often the picture is looked after."""


def live_training(train: Callable[..., Any], *, title: str = "Training", label: str = "", start: bool = True) -> LiveTraining:  # fmt: skip
    """Runs ``train(progress=…, should_stop=…)`` in a thread and shows how it goes; ``train`` is `lab.train_drafter` with all else bound.

    ``label`` says source and device; without one, it is measured, on the device that the result names. In a notebook the value shows
    itself; ``wait()`` in a later cell holds that cell until the training has ended.
    """
    made = LiveTraining(train, title=title, label=label)
    if start:
        made.start()
    return made


class LiveTraining:
    """A training to look at. ``state``: ``starting``, ``running``, ``complete``, ``stopped`` or ``failed``; ``result`` is what it returned."""

    def __init__(self, train: Callable[..., Any], *, title: str, label: str) -> None:
        self.title, self.label, self.result = title, label or HERE, None
        self.error: BaseException | None = None
        """What ended it, where it failed."""
        self._train, self._shown = train, 0
        self._job: Any = None
        self._watch: Watch | None = None
        self._rows: dict[int, dict[str, float]] = {}
        self.guard = Guard()
        self.bar = W.FloatProgress(value=0, min=0, max=1, layout=W.Layout(width="160px"))
        self.status = W.HTML(layout=W.Layout(margin="0 8px"))
        self.stop_button = W.Button(description="Stop ■", tooltip="after this step; the state is kept", disabled=True, layout=W.Layout(width="72px"))  # fmt: skip
        self.go_button = W.Button(description="Go on ▸", tooltip="from where it stopped", disabled=True, layout=W.Layout(width="80px"))  # fmt: skip
        self.stop_button.on_click(self.guard(lambda _: self.stop()))
        self.go_button.on_click(self.guard(lambda _: self.start()))
        self.picture = Picture(min_height="400px")
        self.picture.show(self.figure)
        line = W.HBox([self.bar, self.stop_button, self.go_button, self.status], layout=W.Layout(align_items="center"))
        self.widget = W.VBox([line, self.guard.widget, self.picture.widget])
        self.widget.add_class("dspark-training")
        in_turn(self.widget)

    @property
    def running(self) -> bool:
        return self._watch is not None and not self._watch.done

    @property
    def state(self) -> str:
        return "starting" if self._job is None else self._job.poll().state

    @property
    def history(self) -> pd.DataFrame:
        """What was logged, a row a step."""
        return pd.DataFrame([row for _, row in sorted(self._rows.items())])

    @property
    def figure(self) -> go.Figure:
        """The curves as they stand, for saved notebooks."""
        return training_curves(self.history, title=self.title, label=self.label)

    def start(self) -> None:
        """Begins, or goes on where it stopped; returns at once. Raises `LabError` where it runs, or has ended."""
        if self.running:
            raise LabError("the training runs already; stop() it, or wait() for it.")
        if self.state == "complete":
            raise LabError("the training is complete; call lab.live_training for another.")
        self.error, self._job = None, _Job(self._train)
        self._offer(running=True)
        self._watch = Watch(self._job, tick=self._tick, end=self._ended, broken=self._broke, every_s=EVERY_S)
        self._watch.start()

    def stop(self) -> None:
        """Tells it to stop after the step that it is at; its state is saved. Raises `LabError` where nothing runs."""
        if not self.running:
            raise LabError("nothing runs; there is nothing to stop.")
        self._job.stop()
        self._say("stopping after this step …")

    def wait(self, timeout: float | None = None) -> Any:
        """Holds the cell until the training has ended, and returns its result; an interrupt of the cell stops the training.

        Raises what the training raised, and `LabError` after ``timeout`` seconds.
        """
        if self._watch is None:
            raise LabError("the training has not begun; start() it.")
        try:
            ended = self._watch.wait(timeout)
        except KeyboardInterrupt:
            self._job.stop()
            ended = self._watch.wait(None)
        if not ended:
            raise LabError(f"the training still runs after {timeout} s; wait longer, or stop() it.")
        if self.error is not None:
            raise self.error
        return self.result

    # -- what the watch calls ----------------------------------------------------------------------------------------

    def _tick(self, progress: Progress) -> None:
        self._rows |= self._job.rows()
        if len(self._rows) != self._shown and self.picture.drawn:
            self._shown = len(self._rows)
            self.picture.grow(self.figure)
        if not progress.done and not self._job.stopping:
            self.bar.value = progress.fraction
            self._say(progress.message or "reading the target …")

    def _ended(self, progress: Progress) -> None:
        self.result, self.error = self._job.result, self._job.error
        if self.label == HERE and (device := getattr(self.result, "device", "")):
            self.label = f"measured · {device}"
        if (whole := getattr(self.result, "history", None)) is not None and len(whole) > len(self._rows):
            self._rows = {int(row["step"]): row for row in whole.to_dict("records")}  # of earlier sittings too
        self.picture.grow(self.figure)
        self.bar.value = progress.fraction
        self.bar.bar_style = {"complete": "success", "stopped": "warning", "failed": "danger"}[progress.state]
        self._offer(running=False, ended=progress.state == "complete")
        self._say(f"{progress.state}, {self._job.seconds:.0f} s. {progress.message}")
        if self.error is not None:
            said = self.error if isinstance(self.error, LabError) else LabError(f"the training failed: {type(self.error).__name__}: {self.error}")  # fmt: skip
            self.guard.show(said, details="".join(traceback.format_exception(self.error)))

    def _broke(self, error: Exception) -> None:
        """The picture can no longer follow: red, and a training that nobody sees is told to stop."""
        self.error = error
        self._job.stop()
        self._offer(running=False)
        self.guard.show(error)

    def _offer(self, *, running: bool, ended: bool = False) -> None:
        self.stop_button.disabled, self.go_button.disabled = not running, running or ended
        if running:
            self.bar.bar_style = ""

    def _say(self, text: str) -> None:
        self.status.value = f'<div style="font-size:12px;line-height:1.2">{html.escape(text)}</div>'

    # -- in a notebook -----------------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget; beside it one line, for pages that run no widgets."""
        bundle: Any = self.widget._repr_mimebundle_() or {}
        return {**bundle, "text/html": f"<p>{html.escape(repr(self))}</p>", "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"LiveTraining({self.title!r}, {self.state}, {len(self._rows)} logged steps, {self.label})"


class _Job:
    """A call in a thread of its own, to be watched."""

    def __init__(self, train: Callable[..., Any]) -> None:
        self.result: Any = None
        self.error: Any = None
        self.runs: Any = None
        self._train, self._began, self._ended = train, time.monotonic(), 0.0
        self._stop, self._logged, self._lock = threading.Event(), dict[int, dict[str, float]](), threading.Lock()
        self._progress = Progress(state="running")
        context = contextvars.copy_context()  # whose cell or click it is
        threading.Thread(target=context.run, args=(self._run,), name="dspark-lab-training", daemon=True).start()

    def _run(self) -> None:
        fraction = 1.0
        try:
            self.result = self._train(progress=self._heard, should_stop=self._stop.is_set)
            state = "complete" if getattr(self.result, "complete", True) else "stopped"
            fraction = 1.0 if state == "complete" else self._progress.fraction
        except BaseException as e:  # said by the view; a thread that died in silence would look like a hang
            state, self.error, fraction = "failed", e, self._progress.fraction
        self._ended = time.monotonic()
        self._progress = Progress(state=state, fraction=fraction, message=self._progress.message)

    def _heard(self, at: Any) -> None:
        """``at``: a trainer's `Progress`."""
        row = {"step": at.step, "lr": at.lr, **at.scalars, "elapsed_s": at.elapsed_s}
        with self._lock:
            self._logged[at.step] = row
        said = f"step {at.step} of {at.num_steps}, loss {at.scalars['total']:.3f}, {at.elapsed_s:.0f} s"
        self._progress = Progress(state="running", fraction=at.step / at.num_steps, message=said)

    def rows(self) -> dict[int, dict[str, float]]:
        with self._lock:
            return dict(self._logged)

    def poll(self) -> Progress:
        return self._progress

    def stop(self) -> None:
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._began
