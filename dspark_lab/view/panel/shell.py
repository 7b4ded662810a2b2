"""`panel`: the verbs of the lab with toggles. A thin shell: it settles toggles, picks runs, and lets the figures draw."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pandas as pd

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError, unknown
from dspark_lab.runs.record import Run
from dspark_lab.view import tables
from dspark_lab.view.panel import reasons, snippet
from dspark_lab.view.panel.board import Board
from dspark_lab.view.panel.continuing import config_of
from dspark_lab.view.panel.frame import Frame
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.measuring import Measuring, check_ready
from dspark_lab.view.panel.recordings import recordings
from dspark_lab.view.panel.sentence import Finding, found
from dspark_lab.view.panel.stock import Stock, baseline_of
from dspark_lab.view.panel.tabs.diff import DiffTab
from dspark_lab.view.panel.tabs.ep import EpTab
from dspark_lab.view.panel.tabs.export import ExportTab
from dspark_lab.view.panel.tabs.plots import plot_tabs
from dspark_lab.view.panel.tabs.shown import Shown
from dspark_lab.view.panel.tabs.timeline import TimelineTab
from dspark_lab.view.panel.tabs.tokens import TokensTab
from dspark_lab.view.panel.tabs.trace_file import TraceFileTab
from dspark_lab.view.panel.tabs.whatif import WhatIfTab
from dspark_lab.view.panel.turn import in_turn

SOURCES = ("recorded", "live")


def panel(*, source: str = "recorded", strict: bool = False, **toggles: Any) -> Panel:
    """The lab with toggles, in a notebook: recorded H200 runs at once, or runs measured on this machine.

    ``source`` is ``recorded`` or ``live``; ``toggles`` start values by their flat names (``alloc=["none", "blocking"]``,
    ``ep_size=2``, ``num_steps=32``). ``strict`` raises what else would be one red line. Raises `LabError` for unknown names.
    """
    return Panel(source=source, strict=strict, **toggles)


class Panel:
    """Toggles on the left, what was found on the right. Everything shown is there to read: ``config``, ``runs``, ``figure``, ``table``, ``code``."""

    def __init__(self, *, source: str = "recorded", strict: bool = False, **toggles: Any) -> None:
        if source not in SOURCES:
            raise unknown("source", source, SOURCES)
        self.guard = Guard(strict=strict)
        self._records: pd.DataFrame = recordings()
        self.stock = Stock()
        self._tables: dict[Any, pd.DataFrame] = {}
        self._shown = Shown(runs=(), table=pd.DataFrame())
        self._finding = Finding(headline="Nothing is shown yet.")
        self._sound = True
        self._quiet = False
        live = source == "live" or not len(self._records)
        self.board = Board(self._records, live=live, asked=dict(toggles))
        self._tabs: dict[str, Any] = self._make_tabs()
        self.frame = Frame(
            self.board.widget,
            self.guard.widget,
            {n: t.widget for n, t in self._tabs.items()},
            records=self._records,
            live=live,
        )
        self.measuring = Measuring(self.guard, self.frame, self._ended, offer=lambda: self._offer_run(running=False))
        self._connect()
        in_turn(self.frame.widget)
        self.guard(self._refresh)()
        self.stock.warm_up(self._records["name"], self.guard.aside, busy=lambda: self.measuring.running)

    def _make_tabs(self) -> dict[str, Any]:
        plots = plot_tabs()
        order = [
            TimelineTab(self.guard, self._draw),
            *(plots[n] for n in ("Latency", "Compare", "Waits", "Acceptance")),
            TokensTab(self.guard, self._to_continue, self._say_code, seed=self.board.asked.extra.get("seed", 0)),
            EpTab(self.guard, lambda: self.stock.over_ep(self.board, live=self.source == "live"), self.run_over_ep),
            TraceFileTab(self.guard, self._say_code),
            DiffTab(self.guard, self._say_code),
            WhatIfTab(self.guard, self._say_code),
            ExportTab(self.guard),
        ]
        return {t.name: t for t in order}

    def _to_continue(self) -> LabConfig:
        return config_of(self.board, live=self.source == "live", busy=self.measuring.running)

    def _connect(self) -> None:
        f = self.frame
        self.board.observe(self.guard(self._turned))
        f.source.observe(self.guard(lambda _: self._turned(None)), names="value")
        f.tabs.observe(self.guard(lambda _: self._draw()), names="selected_index")
        if hasattr(f.fit, "width"):
            f.fit.observe(self.guard.aside(lambda _: self._fill()), names="width")
        f.run.on_click(self.guard(lambda _: self.run()))
        f.stop.on_click(self.guard(lambda _: self.stop()))

    # -- what there is to read ---------------------------------------------------------------------------------

    @property
    def toggles(self) -> dict[str, Any]:
        """Toggles by name; ``panel.toggles["ep_size"].value = 2`` is a click."""
        return self.board.toggles

    @property
    def source(self) -> str:
        return str(self.frame.source.value)

    @source.setter
    def source(self, value: str) -> None:
        self.frame.source.value = value

    @property
    def config(self) -> LabConfig:
        """The config of the first arm chosen, on recorded data that of the recording."""
        if self.source == "recorded" and self._shown.runs:
            return self._shown.runs[0].config
        return self.board.config()

    @property
    def runs(self) -> list[Run]:
        """The runs shown."""
        return list(self._shown.runs)

    @property
    def table(self) -> pd.DataFrame:
        """`lab.compare` of the runs shown."""
        return self._shown.table

    @property
    def tab(self) -> str:
        """Name of the tab in front; settable."""
        return list(self._tabs)[self.frame.tabs.selected_index or 0]

    @tab.setter
    def tab(self, name: str) -> None:
        if name not in self._tabs:
            raise unknown("tab", name, self._tabs)
        self.frame.tabs.selected_index = list(self._tabs).index(name)

    @property
    def figure(self) -> Any:
        """What the tab in front shows: a plotly figure, the `Browse` of a timeline to zoom in, an `Inspection`; None where it has none."""
        return self._tabs[self.tab].figure

    @property
    def code(self) -> str:
        """Python that makes the same picture."""
        return self.frame.code.value

    @property
    def sentence(self) -> str:
        """What the line on top says."""
        return self._finding.text

    @property
    def errors(self) -> list[BaseException]:
        """What went wrong so far, the last at the end."""
        return self.guard.errors

    # -- a change of a toggle ----------------------------------------------------------------------------------

    def _turned(self, name: str | None) -> None:
        if self._quiet:
            return
        live, kept = self.source == "live", self.board.kept()
        asked = self.toggles[name].value if name else None
        try:
            self._silently(lambda: self.board.settle(live=live, turned=name))
            if name and (why := self.board.untaken(name, asked)):
                raise why
            if live and name and self._sound and not reasons.no_torch() and (fault := self.board.fault()):
                text, value = str(fault), self.toggles[name].value
                raise fault if f"{name}=" in text else LabError(f"{name}={value!r} cannot be chosen now: {text}")
        except LabError:  # what cannot be is not taken: the toggle goes back, the red line says why
            self._silently(lambda: self.board.restore(kept, live=live))
            if not live:
                self._silently(lambda: self.board.show(self._shown.runs[0].config if self._shown.runs else None))
            raise
        self._refresh()

    def _silently(self, change: Callable[[], Any]) -> None:
        """What the panel itself sets is no click."""
        self._quiet = True
        try:
            change()
        finally:
            self._quiet = False

    def _refresh(self) -> None:
        """Picks the runs, compares them, says the finding, draws the tab in front."""
        live = self.source == "live"
        fault = self.board.fault() if live and not reasons.no_torch() else None
        self._sound = fault is None
        runs, hint, note = (
            self.stock.recorded(self.board)
            if not live
            else ([], f"Cannot be measured: {fault}", "")
            if fault
            else self.stock.live(self.board)
        )
        if not live:
            self._silently(lambda: self.board.show(runs[0].config if runs else None))
        key = tuple((r.name, r.path, r.status, len(r.steps)) for r in runs)
        if key not in self._tables:
            self._tables[key] = _compared(runs)
        table = self._tables[key]
        self._shown = Shown(runs=tuple(runs), table=table, hint=hint)
        self._finding = found(self._shown, note)
        self.frame.sentence.value = self._finding.html
        self._offer_run()
        self._draw()
        if fault:
            raise fault

    def _draw(self) -> None:
        self._tabs[self.tab].draw(self._shown)
        self._say_code()

    def _fill(self) -> None:
        for tab in self._tabs.values():
            tab.fill(self.frame.plot_width)

    def _say_code(self) -> None:
        tab = self._tabs[self.tab]
        if script := getattr(tab, "script", ""):
            self.frame.code.value = script
            return
        self.frame.code.value = snippet.code_of(self.board, self._shown, tab, live=self.source == "live")

    # -- measuring ---------------------------------------------------------------------------------------------

    def _offer_run(self, *, running: bool | None = None) -> None:
        live = self.source == "live"
        running = self.measuring.running if running is None else running
        why = reasons.no_torch() if live else ""
        self.frame.offer_run(live=live, running=running, why=why)
        sizes = self.board.over_ep().get("ep_size", ()) if live and self._sound else ()
        self._tabs["EP"].offer_run(sizes, why=why or ("a job runs" if running else ""))

    def run(self) -> None:
        """Starts to measure the chosen arms on this machine; returns at once. Progress shows, Stop answers."""
        self._start({"alloc": self.board.arms})

    def run_over_ep(self) -> None:
        """As `run`, at every EP size up to the one chosen, and at least at 1 and 2; the tab EP shows them side by side."""
        self._start(self.board.over_ep())

    def _start(self, axes: dict[str, Any]) -> None:
        if self.source != "live":
            raise LabError("recorded runs are not measured again; choose This machine to run.")
        if not self.measuring.running:
            check_ready(self.board, axes)
            if self._tabs["Tokens"].work.running:
                raise LabError(
                    "the tab Tokens still writes, which would slow what is measured; wait for it, or press its Stop."
                )
        self.measuring.start(self.board.config(), **{**self.board.options, **axes})
        self._offer_run(running=True)
        self.measuring.watch()

    def stop(self) -> None:
        """Stops the job; what was measured so far is kept and shown as stopped."""
        self.measuring.stop()

    def wait(self, timeout: float | None = None) -> list[Run]:
        """Waits for the job, and for what tabs work on; returns the runs shown. Raises `LabError` after ``timeout`` seconds, and what broke in strict mode."""
        before = len(self.errors)
        self.measuring.wait(timeout)
        for tab in self._tabs.values():
            if hasattr(tab, "work"):
                tab.work.wait(timeout)
        if self.guard.strict and len(self.errors) > before:
            raise self.errors[-1]
        return self.runs

    def _ended(self, runs: list[Run], cfg: LabConfig, stopped: bool) -> None:
        """The job's runs become the ones shown; after a failure the last picture stays."""
        self.stock.keep(runs, cfg)
        self._offer_run(running=False)
        if runs:
            self._refresh()
        elif stopped:
            self.frame.say("stopped before anything was measured")

    # -- in a notebook -----------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget; beside it the finding and the table, for saved notebooks and pages that run no widgets."""
        bundle: Any = self.frame.widget._repr_mimebundle_() or {}
        static = f"<p><b>{html.escape(self.sentence)}</b></p>{tables.compare_html(self.table)}"
        return {**bundle, "text/html": static, "text/plain": f"Panel: {self.sentence}"}

    def __repr__(self) -> str:
        return f"Panel(source={self.source!r}, tab={self.tab!r}, runs={[r.name for r in self.runs]})"


def _compared(runs: list[Run]) -> pd.DataFrame:
    from dspark_lab.analysis.latency import compare

    return (
        compare(runs, by="alloc", baseline=baseline_of(runs)) if any(r.role == "arm" for r in runs) else pd.DataFrame()
    )
