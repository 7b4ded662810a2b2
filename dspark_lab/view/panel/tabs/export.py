"""The tab Export: what leaves the lab, a TensorBoard folder or a file for Perfetto."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as W

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.view.panel.tabs.choice import TraceChoice
from dspark_lab.view.panel.tabs.shown import Shown


class ExportTab:
    """A folder for TensorBoard of the runs shown, a file for Perfetto of one trace."""

    name = "Export"
    code = ""
    figure = None

    def __init__(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.folder = W.Text(
            value="tb", description="Folder", layout=W.Layout(width="360px"), style={"description_width": "48px"}
        )
        self.write = W.Button(description="Write TensorBoard folder", layout=W.Layout(width="190px"))
        self.said = W.HTML("Scalars and captures of the runs shown, one folder a run.")
        self.write.on_click(guard(lambda _: self.export()))
        self.choice = TraceChoice("Trace", guard, lambda: None)
        self.file = W.Text(
            value="perfetto.json.gz", description="File", layout=W.Layout(width="360px"), style={"description_width": "48px"}
        )  # fmt: skip
        self.perfetto = W.Button(description="Write Perfetto file", layout=W.Layout(width="190px"))
        self.written = W.HTML(
            "All ranks on one time axis, without overlaps, checked after writing; open it at ui.perfetto.dev."
        )
        self.perfetto.on_click(guard(lambda _: self.export_perfetto()))
        self._runs: tuple[Run, ...] = ()
        rule = W.HTML('<hr style="border:0;border-top:1px solid #E5E7EB;margin:8px 0">', layout=W.Layout(width="100%"))
        self.widget = W.VBox(
            [
                W.HBox([self.folder, self.write]),
                self.said,
                rule,
                self.choice.widget,
                W.HBox([self.file, self.perfetto]),
                self.written,
            ]
        )

    def fill(self, width: int) -> None:
        """There is no picture."""

    def draw(self, shown: Shown) -> None:
        self._runs = tuple(shown.arms)
        self.write.disabled = not self._runs
        self.write.tooltip = "" if self._runs else "no runs are shown; choose some or press Run"
        self.choice.offer(shown.captured)
        if not self.choice.value and shown.captured:
            self.choice.value = self.choice.options[0]

    def export(self) -> Path:
        """Writes the runs shown; raises `LabError` where the folder cannot be written."""
        from dspark_lab.export.tensorboard import to_tensorboard

        if not self._runs:
            raise LabError("there are no runs to export; choose some, or press Run.")
        where = to_tensorboard(list(self._runs), logdir=self.folder.value)
        self.said.value = f"Wrote {len(self._runs)} runs. Look at them with: <code>tensorboard --logdir {html.escape(str(where))}</code>"
        return where

    def export_perfetto(self) -> Path:
        """Writes the trace chosen; raises `LabError` where it is none or the file cannot be written."""
        from dspark_lab.export.perfetto import to_perfetto

        made = to_perfetto(self.choice.opener()(), self.file.value)
        self.written.value = f"Wrote <code>{html.escape(str(made.path))}</code>, {made.path.stat().st_size / 1e6:,.1f} MB. Open it at ui.perfetto.dev."
        return made.path
