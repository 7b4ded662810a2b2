"""`panel`: the verbs of the lab with toggles. A thin shell: it settles toggles, picks runs, and lets the figures draw."""

from __future__ import annotations

import asyncio
import html
import threading
from collections.abc import Callable
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError, unknown
from dspark_lab.runs.record import Run
from dspark_lab.view import reasons, snippet, tables
from dspark_lab.view.board import Board
from dspark_lab.view.frame import Frame
from dspark_lab.view.guard import Guard
from dspark_lab.view.recordings import recordings
from dspark_lab.view.rows import FEW, TOO_FEW, arm_of
from dspark_lab.view.sentence import Finding, finding
from dspark_lab.view.source import one_capture, one_rank, open_cached
from dspark_lab.view.strip import step_strip
from dspark_lab.view.tabs import ExportTab, Shown, TimelineTab, TraceFileTab, code_of_trace, plot_tabs
from dspark_lab.view.watch import Watch

MAX_WARM, MAX_WARM_BYTES = 8, 3_000_000
"""Captures read ahead while the kernel is idle: so many, and none larger."""
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
        self.start_job: Callable[..., Any] = _start_sweep
        self._records: pd.DataFrame = recordings()
        self._loaded: dict[str, Run] = {}
        self._measured: dict[LabConfig, dict[tuple[str, str], Run]] = {}
        self._tables: dict[Any, pd.DataFrame] = {}
        self._job: Any = None
        self._watch: Watch | None = None
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
        self._connect()
        self.guard(self._refresh)()
        self._warm_up()

    def _make_tabs(self) -> dict[str, Any]:
        plots = plot_tabs()
        timeline = TimelineTab(self.guard, self._draw)
        trace_file = TraceFileTab(self.guard, self._say_code)
        order = [
            timeline,
            plots["Latency"],
            plots["Compare"],
            plots["Waits"],
            plots["Acceptance"],
            trace_file,
            ExportTab(self.guard),
        ]
        return {t.name: t for t in order}

    def _connect(self) -> None:
        f = self.frame
        self.board.observe(self.guard(self._turned))
        f.source.observe(self.guard(lambda _: self._turned(None)), names="value")
        f.tabs.observe(self.guard(lambda _: self._draw()), names="selected_index")
        if hasattr(f.fit, "width"):
            f.fit.observe(self.guard(lambda _: self._fill()), names="width")
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
    def figure(self) -> go.Figure | None:
        """The figure of the tab in front."""
        return self._tabs[self.tab].picture.figure

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
        try:
            self._silently(lambda: self.board.settle(live=live, turned=name))
            if live and name and self._sound and not reasons.no_torch() and (fault := self.board.fault()):
                text, value = str(fault), self.toggles[name].value
                raise fault if f"{name}=" in text else LabError(f"{name}={value!r} cannot be chosen now: {text}")
        except LabError:  # what cannot be is not taken: the toggle goes back, the red line says why
            self._silently(lambda: self.board.restore(kept, live=live))
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
            self._recorded_runs()
            if not live
            else ([], f"Cannot be measured: {fault}", "")
            if fault
            else self._live_runs()
        )
        if not live:
            self._silently(lambda: self.board.show(runs[0].config if runs else None))
        key = tuple((r.name, r.path, r.status, len(r.steps)) for r in runs)
        if key not in self._tables:
            self._tables[key] = _compared(runs)
        table = self._tables[key]
        self._shown = Shown(runs=tuple(runs), table=table, hint=hint)
        self._finding = self._found(hint, note)
        self.frame.sentence.value = self._finding.html
        self._offer_run()
        self._draw()
        if fault:
            raise fault

    def _found(self, hint: str, note: str) -> Finding:
        runs = self._shown.runs
        if not runs:
            return Finding(headline=hint)
        found = finding(self._shown.table, leads_ms=self._leads(), on_gpu=runs[0].device != "cpu")
        stopped = "stopped early: what was measured so far" if any(r.status == "stopped" for r in runs) else ""
        others = " · ".join(x for x in (note, stopped, found.others) if x)
        return Finding(headline=found.headline, others=others, label=found.label)

    def _draw(self) -> None:
        self._tabs[self.tab].draw(self._shown)
        self._say_code()

    def _fill(self) -> None:
        for tab in self._tabs.values():
            tab.picture.fill(self.frame.plot_width)

    def _say_code(self) -> None:
        tab = self._tabs[self.tab]
        if isinstance(tab, TraceFileTab):
            self.frame.code.value = code_of_trace(tab)
            return
        runs, arms = self._shown.runs, self.board.arms
        base = _baseline(list(runs)) if runs else (arms or ["none"])[0]
        picture = tab.picture_code() if hasattr(tab, "picture_code") else ""
        if self.source == "recorded":
            self.frame.code.value = snippet.recorded_code(
                [r.name for r in runs],
                baseline=base,
                tab=self.tab,
                picture=picture,
                arms=snippet.arms_of(runs, self._shown.arms),
            )
            return
        self.frame.code.value = snippet.live_code(
            self.board.base,
            changes=self.board.changes(),
            arms=arms,
            options=self.board.options,
            baseline=base,
            tab=self.tab,
            picture=picture,
            picked=snippet.ARMS,
        )

    # -- runs --------------------------------------------------------------------------------------------------

    def _recorded_runs(self) -> tuple[list[Run], str, str]:
        """(runs, why none, a note)."""
        from dspark_lab.runs.store import load_run

        rows = self.board.rows
        for name in rows["name"]:
            if name not in self._loaded:
                self._loaded[name] = load_run(name)
        order = {a: i for i, a in enumerate(self.board.toggles["alloc"].boxes)}
        runs = [self._loaded[n] for n in rows["name"]]
        runs.sort(key=lambda r: (r.role != "arm", r.config.engine.mask_padding, order.get(r.config.engine.alloc, 99)))
        return runs, "" if runs else "No strategy is chosen: tick one on the left.", ""

    def _live_runs(self) -> tuple[list[Run], str, str]:
        arms = self.board.arms
        if why := reasons.no_torch():
            return [], f"Nothing can be measured here: {why}.", ""
        if not arms:
            return [], "No strategy is chosen: tick one on the left.", ""
        key = _key(self.board.config())
        have = self._measured.get(key, {})
        if not have and not self._measured:
            o = self.board.options
            named = ", ".join([*arms, *["the floor"] * self.board.floor])
            few = o["processes"] if o["processes"] > 1 else o["repeats"]
            said = f"Nothing measured here yet. Run measures {named}: {o['processes']} × {o['repeats']} blocks of {o['num_steps']} steps each."
            return [], said + f" That is {TOO_FEW}: take {FEW} processes." * (few < FEW), ""
        note = ""
        if not have:
            key, have = list(self._measured.items())[-1]
            note = f"measured with other settings ({_differs(key, self.board.config())}): press Run for these"
        runs = [r for r in have.values() if (self.board.floor if _is_floor(r) else r.config.engine.alloc in arms)]
        missing = [a for a in arms if a not in {r.config.engine.alloc for r in runs if not _is_floor(r)}]
        missing += ["the floor"] * (self.board.floor and not any(_is_floor(r) for r in runs))
        if missing and not note:
            note = f"not measured yet: {', '.join(missing)}: press Run"
        return runs, "" if runs else f"Not measured yet: {', '.join(missing)}. Press Run.", note

    def _warm_up(self) -> None:
        """Reads the recordings not shown yet, one at a time while the kernel is idle, so that toggles answer at once."""
        from dspark_lab.runs.store import load_run

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no notebook around: nobody waits
            return
        names = [n for n in self._records["name"] if n not in self._loaded]
        drawn: list[str] = []

        def one() -> None:
            if names and not self._running:
                name = names.pop(0)
                if name not in self._loaded:
                    self._loaded[name] = load_run(name)
                run = one_capture(self._loaded[name])
                if run.trace_paths and len(drawn) < MAX_WARM and run.trace_paths[0].stat().st_size < MAX_WARM_BYTES:
                    drawn.append(name)
                    step_strip([run])
                loop.call_later(0.1, one)

        loop.call_later(1.0, self.guard(one))

    def _leads(self) -> dict[str, float]:
        """Median launch lead of each arm's capture from the third step on, ms."""
        leads = {}
        for run in self._shown.arms:
            if run.trace_paths and run.device != "cpu":
                rows = one_rank(open_cached(run)).steps()["launch_lead_us"].iloc[2:].dropna()
                if len(rows):
                    leads[arm_of(run)] = float(rows.median()) / 1e3
        return leads

    # -- measuring ---------------------------------------------------------------------------------------------

    @property
    def _running(self) -> bool:
        return self._watch is not None and not self._watch.done

    def _offer_run(self, *, running: bool | None = None) -> None:
        live = self.source == "live"
        running = self._running if running is None else running
        self.frame.offer_run(live=live, running=running, why=reasons.no_torch() if live else "")

    def run(self) -> None:
        """Starts to measure the chosen arms on this machine; returns at once. Progress shows, Stop answers."""
        if self.source != "live":
            raise LabError("recorded runs are not measured again; choose This machine to run.")
        if why := reasons.no_torch():
            raise LabError(f"{why}.")
        if self._running:
            raise LabError("a job runs already; wait for it, or press Stop.")
        if not self.board.arms:
            raise LabError("no strategy is chosen; tick at least one on the left.")
        if fault := self.board.fault():
            raise fault
        cfg = self.board.config()
        options, key = self.board.options, _key(cfg)
        self._job = self.start_job(cfg, alloc=self.board.arms, **options)
        blocks = {n: options[n] for n in ("repeats", "processes")}
        self._watch = Watch(
            self._job, tick=lambda p: self.frame.show_progress(p, **blocks), end=lambda p: self._ended(p, key), broken=self._broke
        )  # fmt: skip
        self._offer_run(running=True)
        self._watch.start()

    def stop(self) -> None:
        """Stops the job; what was measured so far is kept and shown as stopped."""
        if not self._running:
            raise LabError("nothing runs; there is nothing to stop.")
        self.frame.say("stopping …")
        threading.Thread(target=self.guard(self._job.stop), daemon=True).start()

    def wait(self, timeout: float | None = None) -> list[Run]:
        """Waits for the job and returns the runs shown. Raises `LabError` after ``timeout`` seconds, and what broke in strict mode."""
        before = len(self.errors)
        if self._watch is not None and not self._watch.wait(timeout):
            raise LabError(f"the job still runs after {timeout} s; wait longer, or stop() it.")
        if self.guard.strict and len(self.errors) > before:
            raise self.errors[-1]
        return self.runs

    def _ended(self, progress: Any, key: LabConfig) -> None:
        """The job's runs become the ones shown; a failure turns red and the last picture stays."""
        runs = list(self._job.runs or [])
        if progress.state == "stopped":  # during start-up an arm may be there without a step
            runs = [r for r in runs if len(r.steps) or r.trace_paths]
        for r in runs:
            self._measured.setdefault(key, {})[arm_of(r), r.role] = r
        if key in self._measured:
            self._measured[key] = self._measured.pop(key)
        self._offer_run(running=False)
        if progress.state == "failed":
            error = self._job.error
            self.guard.show(
                error if isinstance(error, BaseException) else LabError(str(error or progress.message)),
                details=str(error),
            )
        if runs:
            self._refresh()
        elif progress.state == "stopped":
            self.frame.say("stopped before anything was measured")

    def _broke(self, error: Exception) -> None:
        """What was to be watched cannot be: red, Run can be pressed again, and a job that nobody sees is told to end."""
        self._offer_run(running=False)
        self.frame.broken()
        self.guard.show(error)
        try:
            self._job.stop()
        except Exception as e:  # said too: its processes may still run
            self.guard.show(e)

    # -- in a notebook -----------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget; beside it the finding and the table, for saved notebooks and pages that run no widgets."""
        bundle: Any = self.frame.widget._repr_mimebundle_() or {}
        static = f"<p><b>{html.escape(self.sentence)}</b></p>{tables.compare_html(self.table)}"
        return {**bundle, "text/html": static, "text/plain": f"Panel: {self.sentence}"}

    def __repr__(self) -> str:
        return f"Panel(source={self.source!r}, tab={self.tab!r}, runs={[r.name for r in self.runs]})"


def _start_sweep(cfg: LabConfig, **options: Any) -> Any:
    from dspark_lab.runs.runner import start_sweep

    return start_sweep(cfg, **options)


def _compared(runs: list[Run]) -> pd.DataFrame:
    from dspark_lab.analysis.latency import compare

    return compare(runs, by="alloc", baseline=_baseline(runs)) if any(r.role == "arm" for r in runs) else pd.DataFrame()


def _baseline(runs: list[Run]) -> str:
    arms = [r.config.engine.alloc for r in runs if r.role == "arm"]
    return "none" if "none" in arms else arms[0]


def _is_floor(run: Run) -> bool:
    """Whether this is the arm that Floor adds: where the mask is on for the others."""
    return not run.config.engine.mask_padding and run.config.parallel.ep_size > 1 and run.config.engine.alloc == "none"


def _key(cfg: LabConfig) -> LabConfig:
    """What a set of arms shares: the config without its strategy."""
    return cfg.replace(alloc="on_demand")


def _differs(a: LabConfig, b: LabConfig) -> str:
    one, two = a.to_dict(), b.to_dict()
    names = [n for n in one if n != "alloc" and one[n] != two.get(n)]
    return ", ".join(f"{n} {one[n]}" for n in names[:3]) or "other settings"
