"""The panel's outer parts: the bar on top, the sentence, the red line, toggles beside tabs, the code below."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets as W
import pandas as pd

from dspark_lab.view.fit import fit

STYLE = """<style>
.dspark-panel .widget-checkbox label, .dspark-panel .widget-label, .dspark-board { font-size: 12px; }
.dspark-panel .widget-html-content { line-height: 1.3; min-width: 0; white-space: normal; }
.dspark-bar > * { flex-shrink: 0; }
.dspark-panel .widget-dropdown select { font-size: 12px; }
.dspark-panel .jupyter-widget-tab > .widget-tab-contents { padding: 4px; overflow: hidden; }
.dspark-panel .lm-TabBar-tab { min-width: 60px; }
.dspark-board select:disabled { opacity: .55; }
.dspark-board .widget-vbox, .dspark-board .widget-hbox, .dspark-board .widget-html, .dspark-board .widget-checkbox { flex-shrink: 0; }
.dspark-board > * { flex-shrink: 0; }
</style>"""


class Frame:
    """Widgets by name; `Panel` wires them."""

    def __init__(self, board: Any, red: Any, tabs: dict[str, Any], *, records: pd.DataFrame, live: bool) -> None:
        h200 = len(records) and records["device"].str.contains("H200").any()
        self.source = W.ToggleButtons(
            options=[(f"Recorded{' H200' if h200 else ''}", "recorded"), ("This machine", "live")] if len(records) else [("This machine", "live")],
            value="live" if live else "recorded", style={"button_width": "128px"}, layout=W.Layout(margin="0 8px 0 0"),
            tooltips=["runs that ship, as they were measured", "runs measured here and now"] if len(records) else ["no recorded runs ship with this install"],
        )  # fmt: skip
        self.run = W.Button(description="Run ▸", button_style="primary", layout=W.Layout(width="84px"))
        self.stop = W.Button(description="Stop ■", disabled=True, layout=W.Layout(width="84px"))
        self.bar = W.FloatProgress(value=0, min=0, max=1, layout=W.Layout(width="150px", visibility="hidden"))
        self.status = W.HTML(layout=W.Layout(margin="0 0 0 6px", min_width="0", flex="1 1 0%", overflow="hidden"))
        self.sentence = W.HTML(layout=W.Layout(margin="2px 0 2px 0", min_height="44px"))
        self.code = W.Textarea(rows=6, disabled=False, layout=W.Layout(width="100%", height="112px"))
        self.code.add_class("dspark-code")
        fold = W.Accordion([self.code], titles=("copy as Python",), selected_index=None)
        self.tabs = W.Tab(list(tabs.values()), titles=tuple(tabs), selected_index=0)
        top = W.HBox([self.source, self.run, self.stop, self.bar, self.status], layout=W.Layout(align_items="center"))
        top.add_class("dspark-bar")
        self.fit = fit()
        right = W.VBox(
            [self.fit, self.sentence, red, self.tabs, fold],
            layout=W.Layout(flex="1 1 0%", min_width="0", overflow="hidden"),
        )
        body = W.HBox([board, right], layout=W.Layout(width="100%", align_items="flex-start"))
        style = W.HTML(STYLE, layout=W.Layout(height="0", margin="0"))
        self.widget = W.VBox([style, top, body], layout=W.Layout(width="100%"))
        self.widget.add_class("dspark-panel")

    @property
    def plot_width(self) -> int:
        """Pixels that a figure has in a tab; 0 while that is not known."""
        width = int(getattr(self.fit, "width", 0))
        return max(width - 14, 0)

    def offer_run(self, *, live: bool, running: bool) -> None:
        """Which of Run and Stop can be pressed, and why not."""
        self.run.disabled, self.stop.disabled = running or not live, not running
        self.run.tooltip = (
            "a job runs"
            if running
            else "measure the chosen strategies here"
            if live
            else "recorded runs need no Run; choose This machine"
        )
        self.stop.tooltip = "ends the job; what was measured so far stays" if running else "nothing runs"
        if not running and not live and self.bar.value in (0.0, 1.0):
            self.bar.layout.visibility = "hidden"
            self.status.value = ""

    def show_progress(self, progress: Any) -> None:
        """Bar and words for ``arm, process, repeat, step``."""
        self.bar.layout.visibility = "visible"
        self.bar.value = float(progress.fraction)
        self.bar.bar_style = {"failed": "danger", "stopped": "warning", "complete": "success"}.get(progress.state, "")
        if progress.state == "running" and progress.arm:
            said = f"{progress.fraction:.0%}, {progress.arm}, process {progress.process + 1}, repeat {progress.repeat + 1}, step {progress.step}/{progress.num_steps}"
        else:
            said = (
                progress.state
                if progress.state in ("complete", "stopped", "failed")
                else f"{progress.state} {progress.message}"
            )
        self.status.value = f'<span style="font-size:12px;white-space:nowrap">{html.escape(said)}</span>'
