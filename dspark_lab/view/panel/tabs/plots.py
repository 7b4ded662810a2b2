"""The tabs that only draw the runs: Latency, Compare, Waits, Acceptance."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as W
import plotly.graph_objects as go

from dspark_lab.view import figures, tables
from dspark_lab.view.panel.picture import Picture
from dspark_lab.view.panel.tabs.shown import Shown, kept
from dspark_lab.view.theme import message
from dspark_lab.view.waits import waits_table


class PlotTab:
    """One figure of the runs."""

    code = ""

    def __init__(self, name: str, make: Callable[[Shown], go.Figure]) -> None:
        self.name, self._make = name, make
        self.picture = Picture()
        self.widget = W.VBox([self.picture.widget])

    @property
    def figure(self) -> Any:
        return self.picture.figure

    def draw(self, shown: Shown) -> None:
        def make() -> go.Figure:
            return self._make(shown) if shown.runs else message(self.name, shown.hint)

        self.picture.show(kept((self.name, shown.key, shown.hint), make))

    def fill(self, width: int) -> None:
        self.picture.fill(width)


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
        if shown.runs and not shown.captured:
            text = shown.no_capture
            self.picture.show(kept(("waits", text), lambda: message(self.name, text)))
            self._table.value = ""
            return
        super().draw(shown)
        self._table.value = tables.waits_html(waits_table(shown.arms))


def plot_tabs() -> dict[str, PlotTab]:
    """The tabs that only draw the runs, by name."""
    return {
        "Latency": PlotTab("Latency", lambda s: figures.latency(s.arms)),
        "Waits": WaitsTab(),
        "Acceptance": PlotTab("Acceptance", lambda s: figures.acceptance(s.arms)),
        "Compare": CompareTab(),
    }
