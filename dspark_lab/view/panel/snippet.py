"""``copy as Python``: the lines that make the same picture outside the panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.config.shipped import PREFIX
from dspark_lab.runs.record import Run
from dspark_lab.view.panel.board import Board
from dspark_lab.view.panel.controls import SHIPPED
from dspark_lab.view.panel.stock import baseline_of
from dspark_lab.view.panel.tabs.shown import Shown

ONLY_ARMS = '[r for r in runs if r.role == "arm"]'
ARMS = '[r for r in runs if r.role == "arm" and not r.same_path_as]'
"""Runs with steps of their own: no A/A pairs, no arm that shows another's figures."""
PICTURES: dict[str, str] = {
    "Latency": "lab.plot.latency({arms})",
    "Timeline": "lab.plot.step_strip({arms})",
    "Waits": "lab.plot.waits({arms})",
    "Acceptance": "lab.plot.acceptance({arms})",
    "Compare": "lab.plot.comparison(table)",
    "EP": "lab.plot.expert_heatmap([r for r in {arms} if r.config.parallel.ep_size > 1][:1])",
}


def arms_of(runs: Sequence[Run], arms: Sequence[Run]) -> str:
    """The expression that picks ``arms`` from ``runs``."""
    if len(runs) == len(arms):
        return "runs"
    return ONLY_ARMS if len(arms) == sum(r.role == "arm" for r in runs) else ARMS


def code_of(board: Board, shown: Shown, tab: Any, *, live: bool) -> str:
    """The lines for what the tab in front shows; it has a ``name``, and may have a line of its own, ``code``."""
    runs, arms = shown.runs, board.arms
    base = baseline_of(list(runs)) if runs else (arms or ["none"])[0]
    if not live:
        picked = arms_of(runs, shown.arms)
        return recorded_code([r.name for r in runs], baseline=base, tab=tab.name, picture=tab.code, arms=picked)
    return live_code(
        board.asked.base, changes=board.changes(), arms=arms, options=board.options, baseline=base, tab=tab.name, picture=tab.code
    )  # fmt: skip


def recorded_code(names: Sequence[str], *, baseline: str, tab: str, picture: str = "", arms: str = ARMS) -> str:
    """Five lines on runs that ship."""
    first = [f"names = {list(names)!r}", "runs = [lab.load_run(name) for name in names]"]
    return _lines(first, baseline, tab, picture, arms)


def live_code(
    cfg: LabConfig,
    *,
    changes: dict[str, Any],
    arms: Sequence[str],
    options: dict[str, Any],
    baseline: str,
    tab: str,
    picture: str = "",
    picked: str = ARMS,
) -> str:
    """Five lines that measure and draw on this machine."""
    first = arms[0] if arms else "none"
    toggles = "".join(f", {k}={v!r}" for k, v in {"alloc": first, **changes}.items())
    more = "".join(f", {k}={v}" for k, v in options.items())
    drafter = str(cfg.model.drafter_path).removeprefix(PREFIX)
    made = f"shipped({drafter!r}" if cfg.preset == SHIPPED else f"preset({cfg.preset!r}"
    lines = [f"cfg = lab.{made}{toggles})", f"runs = lab.sweep(cfg, alloc={list(arms)!r}{more})"]
    return _lines(lines, baseline, tab, picture, picked)


def _lines(runs: list[str], baseline: str, tab: str, picture: str, arms: str) -> str:
    draw = (picture or PICTURES.get(tab, PICTURES["Latency"])).replace("{arms}", arms)
    head = ["import dspark_lab as lab", *runs]
    table = f'table = lab.compare(runs, by="alloc", baseline={baseline!r})'
    return "\n".join([*head, table, f"figure = {draw}"])
