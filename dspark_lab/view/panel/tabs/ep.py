"""The EP tab: load by layer and expert, ranks side by side, and what each rank waited and sent."""

from __future__ import annotations

from typing import Any

import ipywidgets as W

from dspark_lab.analysis.ep import ep_table
from dspark_lab.view import figures, tables
from dspark_lab.view.panel.picture import Picture
from dspark_lab.view.panel.tabs.shown import Shown, kept
from dspark_lab.view.theme import message


class EpTab:
    """Of the runs shown, those at EP above 1: two pictures over a table by rank."""

    name, code = "EP", ""

    def __init__(self) -> None:
        self._load, self._lanes = Picture(), Picture()
        self._table = W.HTML(layout=W.Layout(width="100%"))
        self.widget = W.VBox([self._load.widget, self._lanes.widget, self._table])

    @property
    def figure(self) -> Any:
        return self._load.figure

    def draw(self, shown: Shown) -> None:
        spread = [r for r in shown.arms if r.config.parallel.ep_size > 1 and r.ep][:3]
        if not spread:
            text = shown.hint or "Nothing is spread over ranks here: choose ep_size above 1."
            self._load.show(kept(("EP", text), lambda: message("Rows by layer and expert", text)))
            self._lanes.widget.layout.display = "none"
            self._table.value = ""
            return
        timed = next((r for r in spread if any("exchange" in d for d in r.ep)), None)
        self._load.show(kept(("EP load", shown.key), lambda: figures.expert_heatmap(spread[:1])))
        self._lanes.widget.layout.display = "" if timed is not None else "none"
        if timed is not None:
            self._lanes.show(kept(("EP lanes", shown.key), lambda: figures.ep_lanes(timed)))
        self._table.value = tables.ep_html(ep_table(spread))

    def fill(self, width: int) -> None:
        self._load.fill(width)
        self._lanes.fill(width)
