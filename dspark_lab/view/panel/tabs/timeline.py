"""The tab Timeline: one step of each arm as a strip, or all rows of one arm to zoom in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as W

from dspark_lab.config import ALLOCS
from dspark_lab.runs.record import Run
from dspark_lab.view import figures
from dspark_lab.view.browse.canvas import Browse
from dspark_lab.view.panel.picture import Picture, Stage
from dspark_lab.view.panel.select import Select
from dspark_lab.view.panel.tabs.shown import Shown, kept
from dspark_lab.view.rows import arm_of
from dspark_lab.view.source import one_rank, open_cached
from dspark_lab.view.theme import message

TYPICAL = -1
Guarded = Callable[[Callable[..., Any]], Callable[..., Any]]


def slim(width: str = "150px") -> W.Layout:
    """A control in a row of several."""
    return W.Layout(width=width, margin="0 10px 0 0")


class TimelineTab:
    """The step strip of all arms, or the rows of one to zoom in."""

    name = "Timeline"

    def __init__(self, guard: Guarded, changed: Callable[[], Any]) -> None:
        self.picture, self.stage = Picture(min_height="300px"), Stage()
        self.mode = W.Dropdown(options=["one step of each arm", "one arm, to zoom in"], layout=slim("180px"))
        self.step = Select(
            [TYPICAL], TYPICAL, say=_step, description="Step", layout=slim(), style={"description_width": "34px"}
        )
        self.arm = Select(ALLOCS, None, description="Arm", layout=slim(), style={"description_width": "34px"})
        self._own = False
        self._arms: list[str] = []
        for w in (self.mode, self.step, self.arm):
            w.observe(guard(lambda _: None if self._own else changed()), names="value")
        row = W.HBox([self.mode, self.step, self.arm], layout=W.Layout(margin="0 0 4px 0"))
        self.widget = W.VBox([row, self.picture.widget, self.stage.widget])

    @property
    def figure(self) -> Any:
        """The strip, or the `Browse` in its place."""
        return self.picture.figure if self._strip_in_front else self.stage.figure

    @property
    def _strip_in_front(self) -> bool:
        return self.picture.widget.layout.display != "none"

    def fill(self, width: int) -> None:
        self.picture.fill(width)

    def draw(self, shown: Shown) -> None:
        runs = shown.captured
        strip = self.mode.index == 0 or not runs
        self.arm.layout.display = "none" if strip else ""
        self.picture.widget.layout.display = "" if strip else "none"
        self.stage.widget.layout.display = "none" if strip else ""
        if not runs:
            text = shown.no_capture
            self.picture.show(kept(("no capture", text), lambda: message(self.name, text)))
            return
        self._offer(runs)
        if strip:
            key = ("strip", tuple(r.name for r in runs), shown.key, self.step.value)
            self.picture.show(kept(key, lambda: figures.step_strip(shown.arms, step=self.step_shown)))
            return
        run = next(r for r in runs if arm_of(r) == self.arm.value)
        first = self.step_shown
        steps = None if first is None else slice(first, first + 1)
        title = f"{arm_of(run)} · {run.shown_source} on {run.device_name}"
        key = (run.name, str(run.path), run.status, first)
        self.stage.show(key, lambda: Browse(open_cached(run, whole=True), steps=steps, title=title))

    @property
    def step_shown(self) -> int | None:
        """The step chosen; None: a typical one, or three steps from the third on."""
        value = int(self.step.value or 0)
        return None if value < 0 else value

    @property
    def code(self) -> str:
        """The line that draws it, with ``{arms}`` where the runs go."""
        n = self.step_shown
        if self.mode.index == 0:
            return f"lab.plot.step_strip({{arms}}{'' if n is None else f', step={n}'})"
        at = self._arms.index(self.arm.value)
        steps = "" if n is None else f", steps=slice({n}, {n + 1})"
        return f"lab.browse([r for r in {{arms}} if r.trace_paths][{at}]{steps})"

    def _offer(self, runs: Sequence[Run]) -> None:
        """The lists follow the runs; the choice stays where it can."""
        self._own = True
        try:
            self._arms = [arm_of(r) for r in runs]
            slow = "blocking" if "blocking" in self._arms else self._arms[0]
            self.arm.offer(self._arms, self.arm.value if self.arm.value in self._arms else slow)
            numbers = set.intersection(*(set(one_rank(open_cached(r)).steps()["step"]) for r in runs))
            steps = [TYPICAL, *(int(n) for n in numbers)]
            self.step.know([TYPICAL, *range(max(steps) + 1)])
            self.step.offer(steps, self.step.value if self.step.value in steps else TYPICAL)
        finally:
            self._own = False


def _step(number: int) -> str:
    return "typical" if number == TYPICAL else str(number)
