"""Tables as HTML for the panel and for saved notebooks: what a person reads of `lab.compare` and of a trace's summary."""

from __future__ import annotations

import html
import math
from typing import Any

import pandas as pd

from dspark_lab.view.figures import verdict_text
from dspark_lab.view.rows import by_arm, is_few, records
from dspark_lab.view.theme import joined, signed

CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;white-space:nowrap"
LAST = "padding:2px 0;text-align:left;vertical-align:top;white-space:normal;overflow-wrap:anywhere"


def compare_html(table: pd.DataFrame) -> str:
    """Arms with step, interval, acceptance, throughput and verdict; under it why, and where it was measured."""
    if table is None or not len(table):
        return "<i>Nothing to compare yet.</i>"
    by, rows = str(table.columns[0]), by_arm(table)
    head = [by, "step, ms", "95 %", "accepted", "tok/s", "against the baseline"]
    cells = [
        [r[by], _num(r["step_ms_p50"], 3), _between(r), _num(r.get("accept_length"), 2), _num(r.get("tokens_per_s"), 0), verdict_text(r)]
        for r in rows
    ]  # fmt: skip
    why: dict[str, list[str]] = {}
    for r in rows:
        if _text(r.get("reason")):
            why.setdefault(str(r["reason"]), []).append(str(r[by]))
    notes = [f"{', '.join(names)}: {reason}" for reason, names in why.items()]
    return _html(head, cells) + "".join(_note(n) for n in [*notes, joined(str(r.get("label", "")) for r in rows)])


def _between(row: dict[str, Any]) -> str:
    ci = row.get("step_ms_ci95")
    return f"{ci[0]:.3f} to {ci[1]:.3f}" if isinstance(ci, (list, tuple)) else "too few" if is_few(row) else "–"


def _note(text: str) -> str:
    return f'<div style="font-size:12px;color:var(--jp-ui-font-color2,#6B7280)">{html.escape(text)}</div>'


def summary_html(summary: dict[str, Any]) -> str:
    """What is not sound in a trace, the figures of `lab.summarize` and waits; of several ranks one table each."""
    if "ranks" in summary:
        return "".join(f"<b>rank {rank}</b>{summary_html(one)}" for rank, one in summary["ranks"].items())
    s = summary
    waits = s.get("host_wait_us_p50") or {}
    head = ["steps", "p50, µs: step", "launch lead", "in sync", "event wait", "blocking copy", "kernels"]
    row = [s.get("num_steps"), _num(s.get("step_us_p50"), 0), _signed(s.get("launch_lead_us_p50")), _num(waits.get("sync"), 0),
           _num(waits.get("event_wait"), 0), _num(waits.get("blocking_copy"), 0), _num(s.get("kernels_per_step"), 0)]  # fmt: skip
    out = _html(head, [row])
    top = (s.get("waits") or [])[:4]
    if top:
        rows = [[w["name"], w["kind"], w["count"], _num(w["total_us"], 0), w["site"]] for w in top]
        out += _html(["the host waits in", "kind", "times", "µs in all", "where"], rows)
    return integrity_html(s.get("integrity") or {}) + out


def waits_html(table: pd.DataFrame) -> str:
    """Rows of `view.waits.waits_table`."""
    rows = [
        [r["arm"], r["kind"], _num(r["times_per_step"], 1), _num(r["us_per_step"], 1), _call(r)] for r in records(table)
    ]  # fmt: skip
    return _html(["arm", "kind", "a step", "µs a step", "call and site"], rows) if rows else ""


def ep_html(table: pd.DataFrame) -> str:
    """Rows of `lab.ep_table`: what each rank waited, exchanged, computed and sent in a step."""
    head = [
        "arm",
        "rank",
        "step, ms",
        "µs a step: waiting",
        "dispatch",
        "experts",
        "combine",
        "sent, kB",
        "rows",
        "real rows",
        "imbalance",
        "bound",
    ]
    rows = [
        [r["name"], r["rank"], _num(r["step_ms_p50"], 3), *(_num(r[f"{k}_us"], 0) for k in ("wait", "dispatch", "experts", "combine")),
         _num(r["bytes_a_step"] / 1e3, 1), _num(r["rows_a_step"], 0), _num(100 * r["real_share"], 0) + " %", _num(r["imbalance"], 3),
         _num(r["bound"], 3)]
        for r in records(table)
    ]  # fmt: skip
    note = "Waiting and exchanges are counted apart from the timed steps: eagerly, each exchange behind a meeting of all ranks."
    return (_html(head, rows) + _note(note)) if rows else ""


def replayed_html(waits: pd.DataFrame) -> str:
    """Waits of a `WhatIf` by site: as measured, as replayed without an edit, as predicted; the bill that moved stands out."""
    rows = [
        [r["kind"], _num(r["measured_us"], 1), _num(r["replayed_us"], 1), _num(r["predicted_us"], 1),
         _signed(r["predicted_us"] - r["replayed_us"]), r["site"]]
        for r in records(waits)
    ]  # fmt: skip
    head = ["the host waits, µs a step", "measured", "replayed", "predicted", "change", "where"]
    return _html(head, rows) if rows else _note("The host does not wait in this capture.")


def _call(wait: dict[str, Any]) -> str:
    """The call at its site; a site without stacks is named after the call already."""
    return str(wait["site"]) if str(wait["site"]).startswith(wait["name"]) else f"{wait['name']}: {wait['site']}"


def integrity_html(integrity: dict[str, Any]) -> str:
    """What a trace lacks, as lines; empty where nothing does."""
    said = [
        *integrity.get("messages", ()),
        *(f"{k} is withheld: {v}" for k, v in integrity.get("withheld", {}).items()),
    ]
    if integrity.get("truncated"):
        said.insert(0, "the file is cut short; what came before is shown")
    return "".join(f'<div style="color:#B34700">⚠ {html.escape(str(x))}</div>' for x in said[:6])


def _html(head: list[str], rows: list[list[Any]]) -> str:
    """A table whose last column wraps; it scrolls sideways where it is still too wide."""

    def line(tag: str, cells: list[Any]) -> str:
        looks = [CELL] * (len(cells) - 1) + [LAST if tag == "td" else CELL]
        weight = ";font-weight:600" if tag == "th" else ""
        return "".join(
            f'<{tag} style="{look}{weight}">{html.escape(str(c))}</{tag}>' for c, look in zip(cells, looks, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return (
        f'<div class="dspark-scroll" style="overflow-x:auto;font-size:12px"><table class="dspark-table" style="border-collapse:collapse">'
        f"<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _num(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{float(value):,.{digits}f}".replace(",", " ")


def _signed(value: Any) -> str:
    return "–" if value is None else signed(float(value), 0)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
