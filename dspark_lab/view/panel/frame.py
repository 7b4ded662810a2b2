"""The panel's outer parts: the bar on top, the sentence, the red line, toggles beside tabs, the code below."""

from __future__ import annotations

import html
import re
from typing import Any

import ipywidgets as W
import pandas as pd

from dspark_lab.view.panel.fit import fit

STYLE = """<style>
.dspark-panel .widget-checkbox label, .dspark-panel .widget-label, .dspark-board { font-size: 12px; }
.dspark-panel .widget-html-content { line-height: 1.3; min-width: 0; white-space: normal; }
.dspark-bar > * { flex-shrink: 0; }
.dspark-panel .widget-dropdown select { font-size: 12px; }
.dspark-panel .jupyter-widget-tab > .widget-tab-contents { padding: 4px; overflow: hidden; }
.dspark-panel .jupyter-widget-tab > .lm-TabBar .lm-TabBar-tab { min-width: 0; flex: 1 1 auto; padding: 0 3px; font-size: 12px; text-align: center; }
.dspark-panel .widget-tab-contents .widget-vbox, .dspark-panel .widget-tab-contents .widget-html { overflow-x: hidden; margin: 0; }
.dspark-panel option[value$="✕"] { display: none; }
.dspark-board select:disabled, .dspark-board input:disabled { opacity: .55; }
.dspark-board .widget-vbox, .dspark-board .widget-hbox, .dspark-board .widget-html, .dspark-board .widget-checkbox { flex-shrink: 0; }
.dspark-board > * { flex-shrink: 0; }
.dspark-board .widget-html-content, .dspark-board .widget-html { line-height: 1.25; height: auto; min-height: 0; }
.dspark-board .widget-text input[type=number] { height: 25px; }
.dspark-board, .dspark-scroll { scrollbar-width: thin; }
.dspark-board::-webkit-scrollbar, .dspark-scroll::-webkit-scrollbar { width: 8px; height: 8px; }
.dspark-board::-webkit-scrollbar-thumb, .dspark-scroll::-webkit-scrollbar-thumb { background: #9CA3AF; border-radius: 4px; }
</style>"""


class Frame:
    """Widgets by name; `Panel` wires them."""

    def __init__(self, board: Any, red: Any, tabs: dict[str, Any], *, records: pd.DataFrame, live: bool) -> None:
        h200 = len(records) and records["device"].str.contains("H200").any()
        self.source = W.ToggleButtons(
            options=[(f"Recorded{' H200' if h200 else ''}", "recorded"), ("This machine", "live")] if len(records) else [("This machine", "live")],
            value="live" if live else "recorded", style={"button_width": "124px"}, layout=W.Layout(margin="0 8px 0 0"),
            tooltips=["runs that ship, as they were measured", "runs measured here and now"] if len(records) else ["no recorded runs ship with this install"],
        )  # fmt: skip
        self.run = W.Button(description="Run ▸", button_style="primary", layout=W.Layout(width="72px"))
        self.stop = W.Button(description="Stop ■", disabled=True, layout=W.Layout(width="72px"))
        self.bar = W.FloatProgress(value=0, min=0, max=1, layout=W.Layout(width="110px", visibility="hidden"))
        self.status = W.HTML(layout=W.Layout(margin="0 0 0 6px", min_width="0", flex="1 1 0%", height="auto"))
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

    def offer_run(self, *, live: bool, running: bool, why: str = "") -> None:
        """Which of Run and Stop can be pressed, and why not; ``why``: nothing runs here at all."""
        self.run.disabled, self.stop.disabled = running or not live or bool(why), not running
        self.run.tooltip = (
            "a job runs"
            if running
            else why
            if live and why
            else "measure the chosen strategies here"
            if live
            else "recorded runs need no Run; choose This machine"
        )
        self.stop.tooltip = "ends the job; what was measured so far stays" if running else "nothing runs"
        if not running and not live and self.bar.value in (0.0, 1.0):
            self.bar.layout.visibility = "hidden"
            self.status.value = ""

    def show_progress(self, progress: Any, *, repeats: int = 1, processes: int = 1) -> None:
        """Bar and words: the arm by its strategy, its block of ``repeats`` × ``processes``, the step."""
        self.bar.layout.visibility = "visible"
        ended_early = progress.state in ("stopped", "failed")  # the bar stays where the job ended
        self.bar.value = max(self.bar.value, float(progress.fraction)) if ended_early else float(progress.fraction)
        self.bar.bar_style = {"failed": "danger", "stopped": "warning", "complete": "success"}.get(progress.state, "")
        self.say(_said(progress, repeats, processes))

    def broken(self) -> None:
        """The job can no longer be watched: the bar says so."""
        self.bar.bar_style = "danger"
        self.say("lost sight of the job")

    def say(self, text: str) -> None:
        """The words beside the bar; they wrap where the window is narrow."""
        self.status.value = f'<div style="font-size:12px;line-height:1.2">{html.escape(text)}</div>'


def _said(progress: Any, repeats: int, processes: int) -> str:
    if progress.state in ("complete", "stopped", "failed"):
        return str(progress.state)
    if progress.state != "running" or not progress.arm:
        return f"{progress.state} {progress.message}".strip()
    block = progress.process * repeats + progress.repeat + 1
    said = f"{progress.fraction:.0%}, {_alloc(progress.arm)}, block {block}/{repeats * processes}"
    return f"{said}, step {progress.step}/{progress.num_steps}"


def _alloc(arm: str) -> str:
    """``tiny-ep2-bs4-persistent.aa`` as ``persistent again``."""
    name = re.sub(r"^.*-bs\d+-", "", arm)
    return name.replace("-maskoff", " (mask off)").replace(".aa", " again")
