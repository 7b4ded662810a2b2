"""The runs that the panel can show: recordings, read when they are first looked at, and what was measured here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.runs.record import Run
from dspark_lab.runs.store import load_run
from dspark_lab.view.panel import reasons, recordings
from dspark_lab.view.panel.board import Board
from dspark_lab.view.panel.turn import TURN
from dspark_lab.view.rows import FEW, TOO_FEW, arm_of
from dspark_lab.view.source import one_capture, one_rank, open_cached
from dspark_lab.view.strip import step_strip

MAX_WARM, MAX_WARM_BYTES = 8, 3_000_000
"""Captures read ahead while the kernel is idle: so many, and none larger."""


class Stock:
    """``recorded`` and ``live`` pick runs for the toggles: (runs, why there are none, a note)."""

    def __init__(self) -> None:
        self._loaded: dict[str, Run] = {}
        self._measured: dict[LabConfig, dict[tuple[str, str], Run]] = {}

    def recorded(self, board: Board) -> tuple[list[Run], str, str]:
        """The recordings chosen, in the order of the strategies."""
        order = {a: i for i, a in enumerate(board.toggles["alloc"].boxes)}
        runs = [self._run(n) for n in board.rows["name"]]
        runs.sort(key=lambda r: (r.role != "arm", r.config.engine.mask_padding, order.get(r.config.engine.alloc, 99)))
        return runs, "" if runs else "No strategy is chosen: tick one on the left.", ""

    def live(self, board: Board) -> tuple[list[Run], str, str]:
        """What was measured here with these settings; else with the last ones, which the note says."""
        arms = board.arms
        if why := reasons.no_torch():
            return [], f"Nothing can be measured here: {why}.", ""
        if not arms:
            return [], "No strategy is chosen: tick one on the left.", ""
        key = _key(board.config())
        have = self._measured.get(key, {})
        if not have and not self._measured:
            return [], _nothing_yet(board), ""
        note = ""
        if not have:
            key, have = list(self._measured.items())[-1]
            note = f"measured with other settings ({_differs(key, board.config())}): press Run for these"
        runs = [r for r in have.values() if (board.floor if _is_floor(r) else r.config.engine.alloc in arms)]
        missing = [a for a in arms if a not in {r.config.engine.alloc for r in runs if not _is_floor(r)}]
        missing += ["the floor"] * (board.floor and not any(_is_floor(r) for r in runs))
        if missing and not note:
            note = f"not measured yet: {', '.join(missing)}: press Run"
        return runs, "" if runs else f"Not measured yet: {', '.join(missing)}. Press Run.", note

    def keep(self, runs: Sequence[Run], cfg: LabConfig) -> None:
        """Keeps what was measured with ``cfg``, at its EP size or at several; what is of ``cfg`` becomes the last one measured."""
        for r in runs:
            self._measured.setdefault(_spread_as(_key(cfg), r.config), {})[arm_of(r), r.role] = r
        if (key := _key(cfg)) in self._measured:
            self._measured[key] = self._measured.pop(key)

    def over_ep(self, board: Board, *, live: bool) -> list[Run]:
        """Runs at every EP size there is, with the other settings as they are: recordings, or what was measured here."""
        arms, floor = board.arms, board.floor
        if not live:
            return [self._run(n) for n in recordings.over_ep(board.table, board.at, arms, floor=floor)["name"]]
        cfg = _key(board.config())
        alike = [runs for key, runs in self._measured.items() if _spread_as(key, cfg) == cfg]
        runs = [r for have in alike for r in have.values() if r.role == "arm"]
        return [
            r
            for r in runs
            if _is_floor(r) or r.config.engine.alloc in (arms if r.config.parallel.ep_size > 1 else [*arms, "none"])
        ]

    def warm_up(self, names: Iterable[str], guard: Callable[..., Any], *, busy: Callable[[], bool]) -> None:
        """Reads the recordings not shown yet, one at a time while the kernel is idle, so that toggles answer at once."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no notebook around: nobody waits
            return
        left = [n for n in names if n not in self._loaded]
        drawn: list[str] = []

        def one() -> None:
            if left and not busy():
                with TURN:
                    read(left.pop(0))
                loop.call_later(0.1, one)

        def read(name: str) -> None:
            run = one_capture(self._run(name))
            if run.trace_paths and len(drawn) < MAX_WARM and run.trace_paths[0].stat().st_size < MAX_WARM_BYTES:
                drawn.append(name)
                step_strip([run])

        loop.call_later(1.0, guard(one))

    def _run(self, name: str) -> Run:
        if name not in self._loaded:
            self._loaded[name] = load_run(name)
        return self._loaded[name]


def leads_ms(arms: Sequence[Run]) -> dict[str, float]:
    """Median launch lead of each arm's capture from the third step on, ms."""
    leads = {}
    for run in arms:
        if run.trace_paths and run.device != "cpu":
            rows = one_rank(open_cached(run)).steps()["launch_lead_us"].iloc[2:].dropna()
            if len(rows):
                leads[arm_of(run)] = float(rows.median()) / 1e3
    return leads


def baseline_of(runs: Sequence[Run]) -> str:
    """The strategy that others are compared with: none where it is shown."""
    arms = [r.config.engine.alloc for r in runs if r.role == "arm"]
    return "none" if "none" in arms else arms[0]


def _nothing_yet(board: Board) -> str:
    o = board.options
    named = ", ".join([*board.arms, *["the floor"] * board.floor])
    few = o["processes"] if o["processes"] > 1 else o["repeats"]
    said = f"Nothing measured here yet. Run measures {named}: {o['processes']} × {o['repeats']} blocks of {o['num_steps']} steps each."
    return said + f" That is {TOO_FEW}: take {FEW} processes." * (few < FEW)


def _is_floor(run: Run) -> bool:
    """Whether this is the arm that Floor adds: where the mask is on for the others."""
    return not run.config.engine.mask_padding and run.config.parallel.ep_size > 1 and run.config.engine.alloc == "none"


def _key(cfg: LabConfig) -> LabConfig:
    """What a set of arms shares: the config without its strategy."""
    return cfg.replace(alloc="on_demand")


def _spread_as(cfg: LabConfig, other: LabConfig) -> LabConfig:
    """``cfg`` with experts and requests spread over ranks as in ``other``."""
    return replace(cfg, parallel=other.parallel)


def _differs(a: LabConfig, b: LabConfig) -> str:
    one, two = a.to_dict(), b.to_dict()
    names = [n for n in one if n != "alloc" and one[n] != two.get(n)]
    return ", ".join(f"{n} {one[n]}" for n in names[:3]) or "other settings"
