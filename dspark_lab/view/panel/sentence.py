"""The one sentence on top of the panel: what was found, how sure, on what, when, profiled or not."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dspark_lab.view.figures import verdict_text
from dspark_lab.view.panel.stock import leads_ms
from dspark_lab.view.panel.tabs.shown import Shown
from dspark_lab.view.rows import FEW, TOO_FEW, by_arm, is_few
from dspark_lab.view.theme import joined, signed

MANY = 3
"""Strategies told one by one, beside the headline's."""
NO_GPU = "Without a GPU there is neither copy nor stream: the strategies tie here by construction"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A headline, what else is known, and the label line. ``text`` is all of it in plain words."""

    headline: str
    others: str = ""
    label: str = ""

    @property
    def text(self) -> str:
        return " ".join(x for x in (self.headline, self.others, self.label) if x)

    @property
    def html(self) -> str:
        soft = "color:var(--jp-ui-font-color2,#6B7280);font-size:12px"
        rest = "".join(f'<div style="{soft}">{html.escape(x)}</div>' for x in (self.others, self.label) if x)
        return (
            '<div style="line-height:1.4;color:var(--jp-ui-font-color1,#1F2937)" class="dspark-sentence">'
            f'<div style="font-size:15px;font-weight:600">{html.escape(self.headline)}</div>{rest}</div>'
        )


def found(shown: Shown, note: str = "") -> Finding:
    """The sentence for the runs shown; ``note`` goes before what else is known."""
    if not shown.runs:
        return Finding(headline=shown.hint)
    of = finding(shown.table, leads_ms=leads_ms(shown.arms), on_gpu=shown.runs[0].device != "cpu")
    stopped = "stopped early: what was measured so far" if any(r.status == "stopped" for r in shown.runs) else ""
    others = " · ".join(x for x in (note, stopped, of.others) if x)
    return Finding(headline=of.headline, others=others, label=of.label)


def finding(table: pd.DataFrame, *, leads_ms: dict[str, float] | None = None, on_gpu: bool = True) -> Finding:
    """The sentence for a table of `lab.compare`. ``leads_ms``: launch lead of each arm, where a capture shows it."""
    rows = by_arm(table)
    timed = [r for r in rows if _number(r.get("step_ms_p50"))]
    if not timed:
        return Finding(headline="No unprofiled steps in these runs, so no step time can be compared.")
    by = str(table.columns[0])
    base = next((r for r in timed if r.get("verdict") == "baseline"), timed[0])
    rivals = [r for r in timed if r is not base and not _text(r.get("same_path_as")) and _number(r.get("delta_pct"))]
    few = any(is_few(r) for r in rivals or timed)
    moved = [r for r in rivals if r.get("verdict") in ("slower", "faster")]
    headline = _headline(by, base, rivals, moved)
    top = max(moved, key=lambda r: abs(r["delta_pct"])) if moved else None
    others = [_text_of(top.get("reason"))] if top else []
    others += [f"{r[by]} {_short(r)}" for r in rivals if r is not top][:MANY]
    others += [f"{len(rivals) - bool(top) - MANY} more under Compare"] * (len(rivals) - bool(top) > MANY)
    others += [f"{TOO_FEW}: at least {FEW} repeats or processes give one"] * few
    others += _same(by, timed)
    others += _numbers(by, top or base, base, leads_ms or {})
    if not on_gpu:
        others.insert(0, NO_GPU)
    return Finding(
        headline=headline,
        others=" · ".join(x for x in others if x),
        label=joined(str(r.get("label", "")) for r in timed),
    )


def _headline(by: str, base: dict[str, Any], rivals: list[dict[str, Any]], moved: list[dict[str, Any]]) -> str:
    of_base = f"{base[by]} ({base['step_ms_p50']:.3f} ms)"
    if not rivals:
        return f"{base[by]}: step {base['step_ms_p50']:.3f} ms{_between(base)}. Choose a second strategy to compare it with."
    if not moved:
        word = (
            "strategies tie"
            if all(r.get("verdict") == "tie" and (r.get("device") == "cpu" or not is_few(r)) for r in rivals)
            else "no strategy is told apart from the baseline"
        )
        return f"{word[0].upper()}{word[1:]}: step {base['step_ms_p50']:.3f} ms{_between(base)} with {base[by]}."
    top = max(moved, key=lambda r: abs(r["delta_pct"]))
    return f"{top[by]}: step {top['step_ms_p50']:.3f} ms, {_change(top, of_base)}."


def _change(row: dict[str, Any], base: str) -> str:
    """``▲ +2.2 % [+1.8, +2.6] slower than none (3.285 ms)``."""
    return f"{verdict_text(row)} than {base}"


def _short(row: dict[str, Any]) -> str:
    """As `verdict_text`; that blocks are too few is said once for all."""
    return verdict_text(row).removesuffix(f", {TOO_FEW}")


def _between(row: dict[str, Any]) -> str:
    ci = row.get("step_ms_ci95")
    return f" [{ci[0]:.3f}, {ci[1]:.3f}]" if _pair(ci) else ""  # type: ignore[index]


def _same(by: str, rows: list[dict[str, Any]]) -> list[str]:
    shared: dict[str, list[str]] = {}
    for r in rows:
        if _text(r.get("same_path_as")):
            shared.setdefault(str(r["same_path_as"]), []).append(str(r[by]))
    return [f"{', '.join(names)}: same code path as {other}" for other, names in shared.items()]


def _numbers(by: str, top: dict[str, Any], base: dict[str, Any], leads: dict[str, float]) -> list[str]:
    said = []
    if top is not base and top[by] in leads and base[by] in leads:
        said.append(f"launch lead {signed(leads[top[by]])} ms against {signed(leads[base[by]])} ms")
    if _number(top.get("accept_length")):
        said.append(f"accept length {top['accept_length']:.2f}")
    if _number(top.get("tokens_per_s")):
        said.append(f"{top['tokens_per_s']:,.0f} tok/s".replace(",", " "))
    return said


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not math.isnan(x)


def _text(x: Any) -> bool:
    return isinstance(x, str) and bool(x)


def _text_of(x: Any) -> str:
    return x if isinstance(x, str) else ""


def _pair(x: Any) -> bool:
    return x is not None and not isinstance(x, float) and len(x) == 2
