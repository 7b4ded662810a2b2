"""`browse`: a timeline to zoom in, which asks for the detail of each view when it is looked at; beside it a still picture for saved notebooks."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as W
import numpy as np

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.span import StepRange, step_number
from dspark_lab.view.browse import pick, wire
from dspark_lab.view.browse.detail import Boxes, Row, look
from dspark_lab.view.browse.scene import Scene, scene
from dspark_lab.view.browse.still import svg
from dspark_lab.view.rows import records

WIDTH = 1000
"""Pixels a view is made for until the browser has told its own."""
MIN_NS = 200
"""No closer: nothing in a trace is shorter than some ns."""
FIRST_STEPS = 3


def browse(traces: Any, *, step: int | None = None, steps: slice | int | None = None, title: str = "") -> Browse:
    """A timeline to zoom, search and click in, for traces of any size; several by name lie under each other.

    ``traces``: what `open_trace` takes (a trace, a path, a folder of ranks, a run), or a dict of such by name, aligned where the step ``step``
    begins (their third common one without). ``steps``: the first view, ``slice(first, end)``; without, three steps from the third on.
    Raises `LabError` for what is no trace and for steps that are not there.
    """
    return Browse(traces, step=step, steps=steps, title=title)


class Browse:
    """A timeline in a notebook. ``scene`` is all there is, ``boxes`` what is drawn now, ``lo_ns`` and ``hi_ns`` from when to when; ``picked`` what was
    clicked last, ``matches`` how many events the search found. ``view_bytes`` went to the browser for the last view, made in ``view_ms``."""

    def __init__(
        self, traces: Any, *, step: int | None = None, steps: slice | int | None = None, title: str = ""
    ) -> None:
        step = step_number(step)
        named = _named(traces, title)
        self.title = title or " against ".join(n for n in named if n) or str(getattr(traces, "name", "Timeline"))
        self.scene: Scene = scene(named, step=step)
        if not self.scene.num_events:
            raise LabError(f"there is nothing to browse: {self.title} holds no events with a duration.")
        self.rows: list[Row] = [t.row for t in self.scene.tracks]
        self.picked: pick.Picked | None = None
        self.matches = 0
        self._width, self._jump, self._at, self._hits = WIDTH, 0, -1, np.zeros((0, 3), dtype=np.int64)
        self.widget: Any = _widget(wire.told(self.scene, self.title))
        self.lo_ns, self.hi_ns = self._window(steps, step)
        self._look()
        if hasattr(self.widget, "on_msg"):
            self.widget.on_msg(lambda _, said, __: self._heard(said))

    # -- what a person does ------------------------------------------------------------------------------------

    def zoom(self, lo_ms: float, hi_ms: float) -> Boxes:
        """Shows the times from ``lo_ms`` to ``hi_ms``. Raises `LabError` where that is no range."""
        if not all(isinstance(t, (int, float)) and np.isfinite(t) for t in (lo_ms, hi_ms)) or hi_ms <= lo_ms:
            raise LabError(f"zoom({lo_ms}, {hi_ms}) is no range of times; give its start and its end in ms.")
        self._jump += 1
        return self._to(round(lo_ms * 1e6), round(hi_ms * 1e6))

    def zoom_steps(self, first: int, last: int) -> Boxes:
        """Shows the steps ``first`` to ``last``. Raises `LabError` where there are none."""
        self._jump += 1
        return self._to(*self._window(slice(first, last + 1), None))

    def search(self, text: str) -> int:
        """Marks the events whose name holds ``text`` (capitals and small letters alike); returns how many. "" marks none."""
        wanted = text.strip().lower()
        codes = np.array([bool(wanted) and wanted in str(n).lower() for n in self.scene.names], dtype=bool)
        hits = []
        self.rows, self.matches, self._at = [], 0, -1
        for i, t in enumerate(self.scene.tracks):
            found = np.flatnonzero(codes[t.row.name]) if codes.any() and len(t.row) else np.zeros(0, dtype=np.int64)
            self.rows.append(t.row.marked(found if wanted else None))
            self.matches += len(found)
            hits.append(np.stack([t.row.start[found], np.full(len(found), i), found], axis=1))
        every = np.concatenate(hits) if hits else self._hits
        self._hits = every[np.argsort(every[:, 0], kind="stable")]
        self._look()
        self._say_found(text)
        return self.matches

    def next(self, way: int = 1) -> pick.Picked | None:
        """Goes to the next event found (−1: the one before), and clicks it; None where the search found none."""
        if not len(self._hits):
            return None
        if self._at < 0:  # the first one in sight, else the first of all
            inside = np.flatnonzero((self._hits[:, 0] >= self.lo_ns) & (self._hits[:, 0] < self.hi_ns))
            self._at = int(inside[0]) if len(inside) else 0
        else:
            self._at = (self._at + way) % len(self._hits)
        at, track, event = (int(x) for x in self._hits[self._at])
        span = self.hi_ns - self.lo_ns
        if not self.lo_ns <= at < self.hi_ns:
            self._jump += 1
            self._to(at - span // 2, at + span - span // 2)
        self._say_found(None)
        return self._show(pick.event(self.scene, track, event))

    def pick(self, track: int, at_ns: int, *, slack_ns: int = 0) -> pick.Picked | None:
        """What lies at a time in a row of the picture, as a click does; None where nothing does."""
        here = (self.boxes.row == track) & (self.boxes.start - slack_ns <= at_ns) & (self.boxes.end + slack_ns >= at_ns)
        own = np.flatnonzero(here & (self.boxes.event >= 0))
        if len(own):
            near = pick.nearest(self.scene.tracks[track], at_ns, slack_ns)
            if near >= 0 and (near in self.boxes.event[own]):
                return self._show(pick.event(self.scene, track, near))
        if len(several := np.flatnonzero(here & (self.boxes.event < 0))):
            box = int(several[0])
            return self._show(pick.merged(self.scene, track, int(self.boxes.start[box]), int(self.boxes.end[box])))
        return self._show(None)

    # -- what is shown -----------------------------------------------------------------------------------------

    @property
    def svg(self) -> str:
        """The view as a still picture that needs neither kernel nor script."""
        return svg(self.scene, self.rows, self.lo_ns, self.hi_ns, title=self.title)

    def __repr__(self) -> str:
        span = f"{self.lo_ns / 1e6:.3f} to {self.hi_ns / 1e6:.3f} ms"
        return f"Browse({self.scene.num_events:,} events in {len(self.scene.tracks)} rows, {span}, profiled)"

    def _ipython_display_(self) -> None:
        """The timeline, and after it the still picture, which the timeline's style hides while there is a kernel behind it."""
        from IPython.display import display

        display(self.widget)
        if not isinstance(self.widget, W.HTML):
            image = b64encode(self.svg.encode()).decode()  # as an image: an untrusted notebook shows no SVG of its own
            still = f'<img class="dspark-still" alt="{escape(repr(self))}" src="data:image/svg+xml;base64,{image}">'
            display({"text/html": still, "text/plain": repr(self)}, raw=True)

    def _window(self, steps: slice | int | None, step: int | None) -> tuple[int, int]:
        """From the start of the chosen steps on the host to their end on the device."""
        numbers = sorted(set(self.scene.steps["step"].tolist()))
        if steps is None:
            first = step if step is not None else numbers[min(2, len(numbers) - 1)] if numbers else 0
            steps = slice(first, first + (1 if len(self.scene.groups) > 1 else FIRST_STEPS))
        wanted, lo, hi = StepRange.of(steps), [], []
        for g in self.scene.groups:
            rows = g.trace.steps()
            for r in records(rows[wanted.holds(rows["step"].to_numpy())]):
                lo.append(r["host_start_ns"] - g.zero_ns)
                device = r["device_start_ns"] > 0 and np.isfinite(r["period_us"])
                hi.append(
                    max(r["host_end_ns"], r["device_start_ns"] + r["period_us"] * 1e3 if device else 0) - g.zero_ns
                )
        if not lo:
            if not numbers:
                return self.scene.lo, max(self.scene.hi, self.scene.lo + MIN_NS)
            raise wanted.none_of(np.array(numbers))
        pad = max((max(hi) - min(lo)) // 100, 1)
        return int(min(lo) - pad), int(max(hi) + pad)

    def _to(self, lo: int, hi: int) -> Boxes:
        self.lo_ns, self.hi_ns = lo, max(hi, lo + MIN_NS)
        return self._look()

    def _look(self) -> Boxes:
        began = time.perf_counter()
        self.boxes, cell = look(self.rows, self.lo_ns, self.hi_ns, pixels=self._width)
        told = wire.view(self.scene, self.boxes, self.lo_ns, self.hi_ns, cell=cell, jump=self._jump)
        self.view_bytes = wire.num_bytes(told)
        self.view_ms = 1e3 * (time.perf_counter() - began)
        if not isinstance(self.widget, W.HTML):
            self.widget.view = told | {"bytes": self.view_bytes, "made_ms": round(self.view_ms, 2)}
        else:
            self.widget.value = self.svg
        return self.boxes

    def _show(self, picked: pick.Picked | None) -> pick.Picked | None:
        self.picked = picked
        if not isinstance(self.widget, W.HTML):
            self.widget.picked = {} if picked is None else wire.outline(self.scene, picked)
        return picked

    def _say_found(self, text: str | None) -> None:
        if not isinstance(self.widget, W.HTML):
            was = dict(self.widget.found)
            self.widget.found = {
                "text": was.get("text", "") if text is None else text,
                "count": self.matches,
                "at": self._at,
            }

    def _heard(self, said: dict[str, Any]) -> None:
        """A message of the browser. What goes wrong is told there in red, and raised no further: nobody would see it."""
        try:
            match said.get("do"):
                case "zoom":
                    self._width = max(int(said["width"]), 100)
                    self._to(int(said["lo"]), int(said["hi"]))
                case "search":
                    self.search(str(said["text"]))
                case "next":
                    self.next(int(said["way"]))
                case "pick":
                    self.pick(int(said["track"]), int(said["at"]), slack_ns=int(said["slack"]))
                case other:
                    raise LabError(
                        f"the timeline does not know {other!r}; reload the page, its script is of another version."
                    )
            self.widget.error = ""
        except Exception as e:
            self.widget.error = (
                str(e) if isinstance(e, LabError) else f"{type(e).__name__}: {e}. This is a bug of the timeline."
            )


def _named(traces: Any, title: str) -> dict[str, Trace | TraceSet]:
    """Traces by name; opened where they are paths or runs."""
    if isinstance(traces, Mapping) and not isinstance(traces, TraceSet):
        bad = [k for k in traces if not isinstance(k, str)]
        if bad:
            raise LabError(f"{bad[0]!r} is no name of a trace; pass browse({{'before': …, 'after': …}}).")
        return {name: open_trace(t) for name, t in traces.items()}
    if isinstance(traces, list | tuple):
        if not traces:
            raise LabError("there is nothing to browse; give a trace, or several by name.")
        opened = [open_trace(t) for t in traces]
        names = [
            t.name if isinstance(t, Run) else getattr(o, "name", f"trace {i + 1}")
            for i, (t, o) in enumerate(zip(traces, opened, strict=True))
        ]
        return {
            n if names.count(n) == 1 else f"{n} ({i + 1})": o
            for i, (n, o) in enumerate(zip(names, opened, strict=True))
        }
    return {"": open_trace(traces)}


@lru_cache(maxsize=1)
def _canvas() -> Any:
    """The widget's class; raises ImportError where anywidget is missing."""
    import anywidget
    import traitlets

    class Canvas(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("canvas.js")
        _css = Path(__file__).with_name("canvas.css")
        scene = traitlets.Dict().tag(sync=True)
        view = traitlets.Dict().tag(sync=True)
        found = traitlets.Dict().tag(sync=True)
        picked = traitlets.Dict().tag(sync=True)
        error = traitlets.Unicode().tag(sync=True)

        def __repr__(self) -> str:  # what a page says that cannot show it
            return "A timeline to zoom in; run the cell to have it. Its still picture is below."

    return Canvas


def _widget(told: dict[str, Any]) -> Any:
    """The canvas; a place for the still picture where anywidget is missing."""
    try:
        return _canvas()(scene=told)
    except ImportError:
        return W.HTML(layout=W.Layout(width="100%"))
