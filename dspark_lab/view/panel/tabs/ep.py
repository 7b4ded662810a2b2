"""The EP tab: load by layer and expert, ranks side by side, the step by EP size, and what each rank waited and sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as W

from dspark_lab.analysis.ep import ep_table
from dspark_lab.config.choices import PLACEMENTS
from dspark_lab.runs.record import Run
from dspark_lab.view import figures, tables
from dspark_lab.view.panel.picture import Picture
from dspark_lab.view.panel.tabs.shown import Shown, kept
from dspark_lab.view.theme import message

ALONE = "Nothing is spread over ranks here: choose ep_size above 1."


class EpTab:
    """Of the runs shown, those at EP above 1: pictures over a table by rank. ``over_ep()`` gives runs at every EP size there is,
    ``sweep()`` measures them."""

    name, code = "EP", ""

    def __init__(
        self,
        guard: Callable[[Callable[..., Any]], Callable[..., Any]],
        over_ep: Callable[[], Sequence[Run]],
        sweep: Callable[[], Any],
    ) -> None:
        self._over_ep = over_ep
        self._load, self._lanes, self._sweep = Picture(), Picture(), Picture()
        self._table = W.HTML(layout=W.Layout(width="100%"))
        self.run = W.Button(layout=W.Layout(width="200px", margin="0 0 8px 0"))
        self.run.on_click(guard(lambda _: sweep()))
        self.widget = W.VBox([self._load.widget, self._lanes.widget, self._sweep.widget, self.run, self._table])
        self.script = ""
        """All lines for the picture in front, where it is of other runs than those shown."""

    @property
    def figure(self) -> Any:
        """The first picture there is."""
        there = [p for p in (self._load, self._lanes, self._sweep) if p.widget.layout.display != "none"]
        return there[0].figure if there else None

    def offer_run(self, sizes: Sequence[int], *, why: str = "") -> None:
        """Offers to measure at these EP sizes; none of them: on recorded runs. ``why`` it cannot be pressed now."""
        self.run.description = f"Run at EP {', '.join(map(str, sizes))} ▸"
        self.run.tooltip = why or "measures the chosen strategies at each of these EP sizes"
        self.run.disabled = bool(why)
        self.run.layout.display = "" if sizes else "none"

    def draw(self, shown: Shown) -> None:
        spread = [r for r in shown.arms if r.config.parallel.ep_size > 1 and r.ep][:3]
        over = self._over_ep()
        counted = _by_placement([r for r in spread if _counted(r)][:1], over)
        timed = next((r for r in spread if any("exchange" in d for d in r.ep)), None)
        swept = len({r.config.parallel.ep_size for r in over}) > 1
        if counted or not (swept or timed):
            text = ALONE if not spread else "No run here counted its expert load: lab.sweep does."
            make = (lambda: figures.expert_heatmap(counted)) if counted else (lambda: message("Rows by layer and expert", shown.hint or text))  # fmt: skip
            self._load.show(kept(("EP load", shown.key, shown.hint, tuple(str(r.path) for r in counted)), make))
        _there(self._load, bool(counted) or not (swept or timed))
        if timed is not None:
            self._lanes.show(kept(("EP lanes", shown.key), lambda: figures.ep_lanes(timed)))
        _there(self._lanes, timed is not None)
        if swept:
            key = ("EP sweep", tuple((r.name, str(r.path), r.status, len(r.steps)) for r in over))
            self._sweep.show(kept(key, lambda: figures.ep_sweep(over)))
        _there(self._sweep, swept)
        self._table.value = tables.ep_html(ep_table(spread)) if spread else ""
        self.script = _script(over) if swept and not counted and timed is None else ""

    def fill(self, width: int) -> None:
        for picture in (self._load, self._lanes, self._sweep):
            picture.fill(width)


def _counted(run: Run) -> bool:
    return any("experts" in d.get("target", {}) for d in run.ep)


def _by_placement(first: list[Run], over: Sequence[Run]) -> list[Run]:
    """Before and after: beside the run shown one of each other placement, where all else is alike."""
    if not first:
        return []
    by = {first[0].config.parallel.placement: first[0]}
    for r in over:
        p = r.config.parallel
        if _counted(r) and replace(p, placement=first[0].config.parallel.placement) == first[0].config.parallel:
            by.setdefault(p.placement, r)
    return [by[name] for name in sorted(by, key=lambda n: PLACEMENTS.index(n))]


def _there(picture: Picture, there: bool) -> None:
    picture.widget.layout.display = "" if there else "none"


def _script(runs: Sequence[Run]) -> str:
    """The lines that draw a sweep of recordings, or of runs measured here."""
    names = [r.name if r.shown_source == "recorded" else str(r.path) for r in runs]
    load = "runs = [lab.load_run(name) for name in names]"
    return f"import dspark_lab as lab\nnames = {names!r}\n{load}\nfigure = lab.plot.ep_sweep(runs)"
