"""The tabs of the panel. Each has a ``widget`` and ``draw(shown)``; figures come from `view.figures`, and are kept."""

from __future__ import annotations

import html
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets as W
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.view import figures, snippet, tables
from dspark_lab.view.picture import Picture
from dspark_lab.view.rows import arm_of
from dspark_lab.view.source import one_rank, open_cached
from dspark_lab.view.theme import message
from dspark_lab.view.waits import waits_table

KEPT = 96
_figures: OrderedDict[Any, go.Figure] = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the panel shows now: the runs, their table, and where they are from."""

    runs: tuple[Run, ...]
    table: pd.DataFrame
    hint: str = ""
    """Said in place of a picture where there are no runs."""

    @property
    def arms(self) -> list[Run]:
        """Runs with steps of their own: no A/A pairs, no arm that shares the code path of another one shown."""
        arms = [r for r in self.runs if r.role == "arm"]
        shown = {r.config.engine.alloc for r in arms}
        return [r for r in arms if not r.same_path_as or r.same_path_as not in shown]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((r.name, str(r.path), r.status, len(r.steps)) for r in self.runs)


def kept(key: Any, make: Callable[[], go.Figure]) -> go.Figure:
    """A figure made once for ``key``; so that a toggle that was turned before answers at once."""
    if key not in _figures:
        _figures[key] = make()
        while len(_figures) > KEPT:
            _figures.popitem(last=False)
    _figures.move_to_end(key)
    return _figures[key]


def _slim() -> W.Layout:
    return W.Layout(width="150px", margin="0 10px 0 0")


class PlotTab:
    """One figure of the runs."""

    def __init__(self, name: str, make: Callable[[Shown], go.Figure]) -> None:
        self.name, self._make = name, make
        self.picture = Picture()
        self.widget = W.VBox([self.picture.widget])

    def draw(self, shown: Shown) -> None:
        def make() -> go.Figure:
            return self._make(shown) if shown.runs else message(self.name, shown.hint)

        self.picture.show(kept((self.name, shown.key, shown.hint), make))

    def picture_code(self) -> str:
        return ""


class CompareTab(PlotTab):
    """Bars with intervals and verdicts, over the table they are of."""

    def __init__(self) -> None:
        super().__init__("Compare", lambda s: figures.comparison(s.table))
        self._table = W.HTML(layout=W.Layout(width="100%"))
        self.widget = W.VBox([self.picture.widget, self._table])

    def draw(self, shown: Shown) -> None:
        super().draw(shown)
        protocols = dict.fromkeys(str(r.quoted["protocol"]) for r in shown.arms if r.quoted.get("protocol"))
        said = "".join(f'<p style="font-size:12px;margin:6px 0">{html.escape(p)}</p>' for p in protocols)
        self._table.value = tables.compare_html(shown.table) + said


class WaitsTab(PlotTab):
    """Host waits of each arm's capture: bars by kind, over the table by site."""

    def __init__(self) -> None:
        super().__init__("Waits", lambda s: figures.waits(s.arms))
        self._table = W.HTML(layout=W.Layout(width="100%"))
        self.widget = W.VBox([self.picture.widget, self._table])

    def draw(self, shown: Shown) -> None:
        if shown.runs and not any(r.trace_paths for r in shown.arms):
            text = no_capture(shown)
            self.picture.show(kept(("waits", text), lambda: message(self.name, text)))
            self._table.value = ""
            return
        super().draw(shown)
        self._table.value = tables.waits_html(waits_table(shown.arms))


def no_capture(shown: Shown) -> str:
    """Why there is no capture of the runs shown."""
    if shown.hint:
        return shown.hint
    if any(r.shown_source == "recorded" for r in shown.arms):
        return "No capture ships with these recordings, only their step tables: see Latency and Compare."
    return "No capture in these runs: profiled steps 0, or stopped before the capture."


class TimelineTab:
    """The step strip of all arms, or the lanes of one."""

    name = "Timeline"

    def __init__(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]], changed: Callable[[], Any]) -> None:
        self.picture = Picture(min_height="300px")
        self.mode = W.Dropdown(
            options=["one step of each arm", "all lanes of one arm"],
            layout=W.Layout(width="180px", margin="0 10px 0 0"),
        )
        self.step = W.Dropdown(
            options=[("typical", -1)], description="Step", layout=_slim(), style={"description_width": "34px"}
        )
        self.arm = W.Dropdown(
            options=[("", None)], description="Arm", layout=_slim(), style={"description_width": "34px"}
        )
        self.count = W.Dropdown(
            options=[1, 2, 4, 8], value=2, description="Steps", layout=_slim(), style={"description_width": "38px"}
        )
        self._own = False
        for w in (self.mode, self.step, self.arm, self.count):
            w.observe(guard(lambda _: None if self._own else changed()), names="value")
        row = W.HBox([self.mode, self.step, self.arm, self.count], layout=W.Layout(margin="0 0 4px 0"))
        self.widget = W.VBox([row, self.picture.widget])

    def draw(self, shown: Shown) -> None:
        with_trace = [r for r in shown.arms if r.trace_paths]
        strip = self.mode.index == 0
        self.arm.layout.display = self.count.layout.display = "none" if strip else ""
        if not with_trace:
            text = no_capture(shown)
            self.picture.show(kept(("no capture", text), lambda: message(self.name, text)))
            return
        self._offer(with_trace)
        if strip:
            key = ("strip", tuple(r.name for r in with_trace), shown.key, self.step.value)
            self.picture.show(kept(key, lambda: figures.step_strip(shown.arms, step=self.step_shown)))
            return
        run = next(r for r in with_trace if arm_of(r) == self.arm.value)
        first, last = self.range
        key = ("lanes", run.name, str(run.path), first, last)
        label = f"{arm_of(run)} · {run.shown_source} on {run.device_name}, profiled"
        self.picture.show(
            kept(key, lambda: figures.timeline(open_cached(run), steps=slice(first, last + 1), label=label))
        )

    @property
    def step_shown(self) -> int | None:
        """The step chosen; None: a typical one."""
        value = int(self.step.value or 0)
        return None if value < 0 else value

    @property
    def range(self) -> tuple[int, int]:
        first = 2 if self.step_shown is None else self.step_shown
        return first, first + int(self.count.value or 1) - 1

    def picture_code(self) -> str:
        if self.mode.index == 0:
            step = "" if self.step_shown is None else f", step={self.step_shown}"
            return f"lab.plot.step_strip({{arms}}{step})"
        first, last = self.range
        at = list(self.arm.options).index((self.arm.value, self.arm.value))
        return f"lab.plot.timeline(lab.open_trace([r for r in {{arms}} if r.trace_paths][{at}]), steps=slice({first}, {last + 1}))"

    def _offer(self, runs: Sequence[Run]) -> None:
        """The lists follow the runs; the choice stays where it can."""
        self._own = True
        try:
            arms = [(arm_of(r), arm_of(r)) for r in runs]
            if tuple(self.arm.options) != tuple(arms):
                was = self.arm.value
                self.arm.options = arms
                slow = next((a for a, _ in arms if a == "blocking"), arms[0][0])
                self.arm.value = was if (was, was) in arms else slow
            numbers = sorted(set.intersection(*(set(one_rank(open_cached(r)).steps()["step"]) for r in runs)))
            steps = (("typical", -1), *((str(n), int(n)) for n in numbers))
            if tuple(self.step.options) != steps:
                was = self.step.value
                self.step.options = steps
                self.step.value = was if was in [v for _, v in steps] else -1
        finally:
            self._own = False


class TraceFileTab:
    """Anybody's Kineto file: its summary and its timeline."""

    name = "Trace file"

    def __init__(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]], changed: Callable[[], Any]) -> None:
        self.path = W.Text(
            placeholder="path of a .json, .json.gz or a folder of ranks",
            continuous_update=False,
            layout=W.Layout(width="480px"),
        )
        self.open = W.Button(description="Open", layout=W.Layout(width="70px", min_width="70px"))
        self.first = W.BoundedIntText(
            value=2,
            min=0,
            max=10**9,
            description="Steps",
            layout=W.Layout(width="120px"),
            style={"description_width": "38px"},
        )
        self.last = W.BoundedIntText(
            value=3,
            min=0,
            max=10**9,
            description="to",
            layout=W.Layout(width="100px"),
            style={"description_width": "18px"},
        )
        self._summary = W.HTML(layout=W.Layout(width="100%"))
        self.picture = Picture()
        self._changed = changed
        for w in (self.path, self.first, self.last):
            w.observe(guard(lambda _: self.load()), names="value")
        self.open.on_click(guard(lambda _: self.load()))
        self.widget = W.VBox(
            [W.HBox([self.path, self.open, self.first, self.last]), self.picture.widget, self._summary]
        )

    def load(self) -> None:
        """Reads the file at ``path``; raises `LabError` where it is none."""
        from dspark_lab.trace import summarize

        text = self.path.value.strip()
        if not text:
            raise LabError("no path given: type the path of a trace (.json or .json.gz), or of a folder of ranks.")
        if "\0" in text:
            raise LabError(
                f"{text!r} is no path: it holds a NUL character; type the path of a .json, .json.gz or a folder."
            )
        trace = open_cached(Path(text).expanduser())
        first, last = self.first.value, max(self.last.value, self.first.value)
        figure = figures.timeline(trace, steps=slice(first, last + 1), title=Path(text).name)
        self._summary.value = tables.summary_html(summarize(trace))
        self.picture.show(figure)
        self._changed()

    def draw(self, shown: Shown) -> None:
        if not self.path.placeholder.startswith("such as"):
            some = next((str(p) for r in shown.runs for p in r.trace_paths), "")
            self.path.placeholder = f"such as {some}" if some else self.path.placeholder
        if self.picture.figure is None:
            self.picture.show(message(self.name, "Give the path of any PyTorch profiler trace, and press Open."))


class ExportTab:
    """What leaves the lab: a TensorBoard folder."""

    name = "Export"

    def __init__(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.folder = W.Text(
            value="tb", description="Folder", layout=W.Layout(width="360px"), style={"description_width": "48px"}
        )
        self.write = W.Button(description="Write TensorBoard folder", layout=W.Layout(width="190px"))
        self.said = W.HTML("Scalars and captures of the runs shown, one folder a run.")
        self.write.on_click(guard(lambda _: self.export()))
        later = W.HTML(
            '<span style="color:#6B7280">Perfetto: not yet. A capture of a run opens there as it is: ui.perfetto.dev, Open trace file.</span>'
        )
        self.picture = Picture(min_height="0")
        self._runs: tuple[Run, ...] = ()
        self.widget = W.VBox([W.HBox([self.folder, self.write]), self.said, later])

    def draw(self, shown: Shown) -> None:
        self._runs = tuple(shown.arms)
        self.write.disabled = not self._runs
        self.write.tooltip = "" if self._runs else "no runs are shown; choose some or press Run"

    def export(self) -> Path:
        """Writes the runs shown; raises `LabError` where the folder cannot be written."""
        from dspark_lab.export.tensorboard import to_tensorboard

        if not self._runs:
            raise LabError("there are no runs to export; choose some, or press Run.")
        where = to_tensorboard(list(self._runs), logdir=self.folder.value)
        self.said.value = f"Wrote {len(self._runs)} runs. Look at them with: <code>tensorboard --logdir {html.escape(str(where))}</code>"
        return where


def plot_tabs() -> dict[str, PlotTab]:
    """The tabs that only draw the runs."""
    return {
        "Latency": PlotTab("Latency", lambda s: figures.latency(s.arms)),
        "Waits": WaitsTab(),
        "Acceptance": PlotTab("Acceptance", lambda s: figures.acceptance(s.arms)),
        "Compare": CompareTab(),
    }


def code_of_trace(tab: TraceFileTab) -> str:
    """The lines for the trace file shown."""
    return snippet.trace_code(tab.path.value, tab.first.value, max(tab.last.value, tab.first.value))
