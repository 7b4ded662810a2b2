"""``copy as Python``: the lines that make the same picture outside the panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_lab.config import LabConfig

PICTURES: dict[str, str] = {
    "Latency": "lab.plot.latency(runs)",
    "Timeline": "lab.plot.step_strip([r for r in runs if r.trace_paths])",
    "Acceptance": "lab.plot.acceptance(runs)",
    "Compare": "lab.plot.comparison(table)",
}


def recorded_code(names: Sequence[str], *, baseline: str, tab: str, picture: str = "") -> str:
    """Five lines on runs that ship."""
    return _lines([f"names = {list(names)!r}", "runs = [lab.load_run(name) for name in names]"], baseline, tab, picture)


def live_code(
    cfg: LabConfig,
    *,
    changes: dict[str, Any],
    arms: Sequence[str],
    options: dict[str, int],
    baseline: str,
    tab: str,
    picture: str = "",
) -> str:
    """Five lines that measure and draw on this machine."""
    first = arms[0] if arms else "none"
    toggles = "".join(f", {k}={v!r}" for k, v in {"alloc": first, **changes}.items())
    more = "".join(f", {k}={v}" for k, v in options.items())
    lines = [f"cfg = lab.preset({cfg.preset!r}{toggles})", f"runs = lab.sweep(cfg, alloc={list(arms)!r}{more})"]
    return _lines(lines, baseline, tab, picture)


def trace_code(path: str, first: int, last: int) -> str:
    """The timeline of a trace file."""
    return (
        f"import dspark_lab as lab\ntrace = lab.open_trace({path!r})\nlab.summarize(trace)\n"
        f"figure = lab.plot.timeline(trace, steps=slice({first}, {last + 1}))\nfigure"
    )


def _lines(runs: list[str], baseline: str, tab: str, picture: str) -> str:
    draw = picture or PICTURES.get(tab, PICTURES["Latency"])
    head = ["import dspark_lab as lab", *runs]
    table = f'table = lab.compare(runs, by="alloc", baseline={baseline!r})'
    return "\n".join([*head, table, f"figure = {draw}"])
