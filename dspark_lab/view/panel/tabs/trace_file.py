"""The tab Trace file: anybody's Kineto file, what it lacks, its steps, and its timeline to zoom in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as W

from dspark_lab.view import tables
from dspark_lab.view.browse.canvas import Browse
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.picture import Stage
from dspark_lab.view.panel.tabs.choice import TraceChoice
from dspark_lab.view.panel.tabs.shown import Shown
from dspark_lab.view.panel.work import Work

ASKED = "Give the path of any PyTorch profiler trace (SGLang, vLLM, your own), gzipped or not, or a folder of ranks, and press Open."


class TraceFileTab:
    """A trace file: summary and timeline. A file that cannot be read leaves what was there."""

    name = "Trace file"

    def __init__(self, guard: Guard, changed: Callable[[], Any]) -> None:
        self.work = Work(guard)
        self.choice = TraceChoice("Trace", guard, self.load)
        self.open = W.Button(description="Open", layout=W.Layout(width="70px", min_width="70px"))
        self.pattern = W.Text(
            placeholder="step pattern (regex)", continuous_update=False, layout=W.Layout(width="150px")
        )  # fmt: skip
        self.said, self.summary, self.stage = W.HTML(ASKED), W.HTML(layout=W.Layout(width="100%")), Stage()
        self._changed, self._code = changed, ""
        self._state: tuple[Any, ...] = ()
        self.pattern.observe(guard(lambda _: self.load()), names="value")
        self.open.on_click(guard(lambda _: self.load()))
        row = W.HBox([self.choice.widget, self.open, self.pattern], layout=W.Layout(flex_flow="row wrap"))
        self.widget = W.VBox([row, self.work.widget, self.said, self.summary, self.stage.widget])
        self.widget.add_class("dspark-trace-file")

    @property
    def figure(self) -> Browse | None:
        return self.stage.figure

    @property
    def script(self) -> str:
        return self._code or "import dspark_lab as lab\ntrace = lab.open_trace('trace.json.gz')"

    def fill(self, width: int) -> None:
        """A timeline is as wide as its place."""

    def load(self) -> None:
        """Opens what is chosen, a large file in a thread; raises `LabError` where it is no trace."""
        from dspark_lab.trace import open_trace, summarize

        pattern = self.pattern.value.strip()
        if (state := (self.choice.state, pattern)) == self._state:
            self.work.leave()
            return
        opener, source, title = self.choice.opener(), self.choice.source, self.choice.title
        more = f", step_pattern={pattern!r}" if pattern else ""
        code = f"import dspark_lab as lab\ntrace = lab.open_trace({self.choice.code}{more})\nlab.summarize(trace)\nlab.step_parts(trace)\nlab.browse(trace)"

        def read() -> tuple[Any, Browse]:
            trace = open_trace(source, step_pattern=pattern) if pattern else opener()
            return summarize(trace), Browse(trace, title=title)

        self.work.run(state, read, lambda made: self._show(state, code, *made), num_bytes=self.choice.num_bytes)

    def _show(self, state: tuple[Any, ...], code: str, found: Any, browse: Browse) -> None:
        self.said.value = ""
        self.summary.value = tables.summary_html(found)
        self.stage.show(state, lambda: browse)
        self._state, self._code = state, code
        self._changed()

    def draw(self, shown: Shown) -> None:
        self.choice.offer(shown.captured)
