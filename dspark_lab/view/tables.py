"""Tables as HTML for the panel and for saved notebooks: what a person reads of `lab.compare` and of a trace's summary."""

from __future__ import annotations

import html
import math
from typing import Any

import pandas as pd

from dspark_lab.view.figures import verdict_text
from dspark_lab.view.rows import records
from dspark_lab.view.theme import signed

CELL = "padding:2px 10px 2px 0;text-align:left;white-space:nowrap"


def compare_html(table: pd.DataFrame) -> str:
    """Arms with step, interval, verdict, acceptance, throughput and where it was measured."""
    if table is None or not len(table):
        return "<i>Nothing to compare yet.</i>"
    by = str(table.columns[0])
    head = [by, "step, ms", "95 %", "against the baseline", "accept length", "tok/s", "EP", "why", "source"]
    rows = []
    for r in records(table):
        ci = r.get("step_ms_ci95")
        rows.append(
            [r[by], _num(r["step_ms_p50"], 3), f"{ci[0]:.3f} to {ci[1]:.3f}" if isinstance(ci, (list, tuple)) else "–", verdict_text(r),
             _num(r.get("accept_length"), 2), _num(r.get("tokens_per_s"), 0), r.get("ep_size", ""), _text(r.get("reason")), r.get("label", "")]
        )  # fmt: skip
    return _html(head, rows)


def summary_html(summary: dict[str, Any]) -> str:
    """The figures of `lab.summarize`, waits and what is not sound; of several ranks one table each."""
    if "ranks" in summary:
        return "".join(f"<b>rank {rank}</b>{summary_html(one)}" for rank, one in summary["ranks"].items())
    s = summary
    waits = s.get("host_wait_us_p50") or {}
    head = [
        "steps",
        "step p50, µs",
        "kernels a step",
        "launch lead p50, µs",
        "blocked in sync p50, µs",
        "event wait p50, µs",
        "blocking copy p50, µs",
    ]
    row = [s.get("num_steps"), _num(s.get("step_us_p50"), 0), _num(s.get("kernels_per_step"), 0), _signed(s.get("launch_lead_us_p50")),
           _num(waits.get("sync"), 0), _num(waits.get("event_wait"), 0), _num(waits.get("blocking_copy"), 0)]  # fmt: skip
    out = _html(head, [row])
    top = (s.get("waits") or [])[:4]
    if top:
        rows = [[w["name"], w["kind"], w["count"], _num(w["total_us"], 0), w["site"]] for w in top]
        out += _html(["the host waits in", "kind", "times", "µs in all", "where"], rows)
    return out + integrity_html(s.get("integrity") or {})


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
    top = "".join(f'<th style="{CELL};font-weight:600">{html.escape(h)}</th>' for h in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{html.escape(str(c))}</td>' for c in row) + "</tr>" for row in rows
    )
    return (
        f'<div style="overflow-x:auto;font-size:12px"><table class="dspark-table" style="border-collapse:collapse">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _num(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{float(value):,.{digits}f}".replace(",", " ")


def _signed(value: Any) -> str:
    return "–" if value is None else signed(float(value), 0)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
