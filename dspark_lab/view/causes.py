"""Figures of what the analyser says of traces: `causes` of a diff, `edits` of a what-if, `step_parts`: where each step goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from dspark_lab.analysis.diff import Diff
from dspark_lab.analysis.steps import step_parts as parts_of
from dspark_lab.analysis.whatif import WhatIf
from dspark_lab.errors import LabError
from dspark_lab.view.lanes import short
from dspark_lab.view.rows import records
from dspark_lab.view.theme import COLOURS, HATCHED, INK, fill, message, signed, titled

MOST = 9
"""Causes told one by one; the others are one bar."""
KINDS = {
    "kernel": "compute", "communication": "communication", "peer_wait": "communication", "copy": "copy", "wait": "wait", "bubble": "host",
    "launch": "host", "graph_gap": "idle",
}  # fmt: skip
SAID = {
    "kernel": "kernel", "communication": "communication", "peer_wait": "waits for a peer", "copy": "copy", "wait": "dry for a wait",
    "bubble": "dry for host work", "launch": "launch latency", "graph_gap": "between graph nodes",
}  # fmt: skip
PARTS = {
    "compute": ("compute", "compute"), "communication": ("communication", "communication"), "peer_wait": ("communication", "waits for a peer"),
    "copy": ("copy", "copies"), "idle_host": ("wait", "idle: waits for the host"), "idle_graph": ("idle", "idle: between graph nodes"),
    "idle_other": ("host", "idle: launch latency"),
}  # fmt: skip
MAX_STEPS = 400
DOUBT = "#B34700"
WORDS = 42


def causes(diff: Diff, *, title: str = "Why the step changed") -> go.Figure:
    """The causes of `lab.diff` as a waterfall from the step before to the step after, µs a step, profiled.

    The axis does not begin at zero: the lines are the two steps, a bar is what a cause adds or takes away.
    """
    if not isinstance(diff, Diff):
        raise LabError(f"causes draws what lab.diff(before, after) gives, not {type(diff).__name__}.")
    if diff.withheld:
        return message(title, f"The causes are withheld: {diff.withheld}.")
    rows = records(diff.parts.reindex(diff.parts["delta_us"].abs().sort_values(ascending=False).index))
    least = max(0.5, 0.01 * abs(diff.delta_us))
    shown = [r for r in rows[:MOST] if abs(r["delta_us"]) >= least]
    rest = diff.delta_us - sum(r["delta_us"] for r in shown)
    names = [f"{SAID.get(r['kind'], r['kind'])}: {_cut(_called(r))}" for r in shown]
    delta = np.array([*(r["delta_us"] for r in shown), rest])
    colours = [KINDS.get(r["kind"], "host") for r in shown] + ["step"]
    names.append(f"{max(len(rows) - len(shown), 0)} smaller causes and the residual")
    hover = [_hover(r) for r in shown] + [f"residual {diff.residual_us:+.2f} µs"]
    start = diff.before_us + np.concatenate(([0.0], np.cumsum(delta)[:-1]))
    figure = go.Figure()
    for i, (at, d, colour) in enumerate(zip(start, delta, colours, strict=True)):
        figure.add_bar(
            x=[abs(d)], base=[min(at, at + d)], y=[i], orientation="h", width=0.6, showlegend=False, hovertext=[hover[i]],
            hovertemplate="%{hovertext}<extra></extra>", marker={"color": "#9CA3AF"} if colour == "step" else fill(colour),
        )  # fmt: skip
        figure.add_annotation(
            x=max(at, at + d), y=i, text=f"<b>{signed(d)}</b>", showarrow=False, xanchor="left", xshift=5
        )
    n = len(delta)
    for x, said, side in ((diff.before_us, "before", -1), (diff.after_us, "after", 1)):
        figure.add_vline(x=x, line={"color": INK, "width": 1.5, "dash": "dot" if side < 0 else "solid"})
        figure.add_annotation(
            x=x, y=-0.75 if side < 0 else n - 0.25, text=f"<b>{said}</b> {x:,.1f} µs".replace(",", " "), showarrow=False,
            xanchor="left" if (diff.delta_us > 0) == (side < 0) else "right", xshift=4 if (diff.delta_us > 0) == (side < 0) else -4,
        )  # fmt: skip
    edge = [*start, *(start + delta)]
    span = max(max(edge) - min(edge), 1.0)
    figure.update_xaxes(title_text="step, µs", range=[min(edge) - 0.12 * span, max(edge) + 0.16 * span])
    figure.update_yaxes(tickvals=list(range(n)), ticktext=names, range=[n + 0.2, -1.2], fixedrange=True, showgrid=False)
    low, high = diff.interval
    ci = f"95 % {signed(low)} to {signed(high)} µs" if np.isfinite(low) and np.isfinite(high) else diff.reason
    ci += ", over steps only: weak" if diff.weak else ""
    label = f"{diff.verdict}: {signed(diff.delta_us)} µs of {diff.before_us:,.0f} a step ({signed(100 * diff.delta_us / diff.before_us)} %), {ci} · profiled captures"
    return titled(figure, title, label, height=150 + 34 * n)


def _called(row: dict[str, Any]) -> str:
    if row["kind"] == "wait":
        return str(row["site"] if str(row["site"]).startswith(str(row["name"])) else f"{row['name']}, {row['site']}")
    return short(str(row["name"]))


def _cut(text: str) -> str:
    return text if len(text) <= WORDS else f"{text[: WORDS - 1]}…"


def _hover(row: dict[str, Any]) -> str:
    count = f"{row['count_before']:.1f} → {row['count_after']:.1f} a step" if row.get("count_before") == row.get("count_before") else ""  # fmt: skip
    return f"{SAID.get(row['kind'], row['kind'])}: {str(row['name'])[:120]}<br>{row['site']}<br>{row['before_us']:.1f} → {row['after_us']:.1f} µs, {count}"


def edits(predicted: WhatIf, *, title: str = "What single edits would gain") -> go.Figure:
    """The best single edits of `lab.whatif`, µs a step that each saves by replay. What the replay does not resolve is pale."""
    if not isinstance(predicted, WhatIf):
        raise LabError(f"edits draws what lab.whatif(trace) gives, not {type(predicted).__name__}.")
    rows = records(predicted.edits)
    if not rows:
        return message(title, "No edits were tried; pass num_edits=10.")
    least = predicted.resolution_us
    names = [_cut(f"{r['edit']} {_target(r)}".strip()) for r in rows]
    colour = [_colour_of(str(r["edit"])) for r in rows]
    figure = go.Figure()
    figure.add_bar(
        x=[r["gain_us"] for r in rows], y=list(range(len(rows))), orientation="h", width=0.6, showlegend=False,
        marker={"color": [COLOURS[c] for c in colour], "opacity": [1.0 if abs(r["gain_us"]) > least else 0.35 for r in rows]},
        hovertext=[f"{r['edit']} {str(r['target'])[:160]}<br>predicted {r['predicted_us']:,.1f} µs" for r in rows],
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip
    for i, r in enumerate(rows):
        figure.add_annotation(
            x=max(r["gain_us"], 0), y=i, text=f"<b>{r['gain_us']:,.0f} µs</b> → {r['predicted_us']:,.0f}", showarrow=False, xanchor="left", xshift=5
        )  # fmt: skip
    most = max(r["gain_us"] for r in rows)
    figure.update_xaxes(
        title_text="µs a step gained, by replay", range=[min(0, *(r["gain_us"] for r in rows)), most * 1.6 + 1]
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=names, range=[len(rows) - 0.4, -0.6], fixedrange=True, showgrid=False
    )
    label = f"measured {predicted.measured_us:,.1f} µs a step, profiled · the replay of the unedited trace is off by {signed(predicted.replay_error_pct, 2)} %"
    label += "" if predicted.exact else f" · a bound, not exact: {'; '.join(predicted.notes)}"
    return titled(figure, title, label, height=130 + 30 * len(rows))


def _target(row: dict[str, Any]) -> str:
    return short(str(row["target"])) if str(row["edit"]).startswith("remove") else str(row["target"])


def _colour_of(edit: str) -> str:
    kinds = {"remove kernel": "compute", "remove copy": "copy", "make non-blocking": "wait"}
    return next((c for k, c in kinds.items() if edit.startswith(k)), "host")


def step_parts(source: Any, *, rank: int | None = None, title: str = "Where each step goes") -> go.Figure:
    """Parts of each step of a trace (`lab.step_parts`), stacked to its period, µs, profiled. A step whose parts are withheld is an outline.

    ``source``: a trace or what `open_trace` takes; ``rank``: which of several (the lowest). Raises `LabError` for a rank that is not there.
    """
    table = parts_of(source)
    have = sorted(set(table["rank"].tolist()))
    rank = rank if rank is not None else (have[0] if have else 0)
    if have and rank not in have:
        raise LabError(f"rank={rank} is not in the trace; it has {', '.join(map(str, have))}.")
    rows = table[(table["rank"] == rank).to_numpy()].head(MAX_STEPS)
    sound = rows[rows["compute_us"].notna()]
    if not rows["period_us"].notna().any():
        return message(title, "No step of the trace has a period on a device.")
    figure = go.Figure()
    for part, (colour, said) in PARTS.items():
        us = sound[f"{part}_us"]
        if len(us) and us.max() > 0:
            marker = (
                fill(colour)
                if colour in HATCHED or part != "peer_wait"
                else {"color": "white", "line": {"color": COLOURS[colour], "width": 1}}
            )
            figure.add_bar(
                x=sound["step"].astype(str),
                y=us,
                name=said,
                marker=marker,
                hovertemplate="step %{x}: %{y:,.1f} µs<extra>" + said + "</extra>",
            )
    lost = rows[rows["compute_us"].isna()]
    if len(lost):
        figure.add_bar(
            x=lost["step"].astype(str), y=lost["period_us"].fillna(0.0), name="⚠ withheld", hovertext=lost["withheld"],
            hovertemplate="%{hovertext}<extra></extra>", text=["⚠"] * len(lost), textposition="outside", textfont={"size": 16, "color": DOUBT},
            marker={"color": "white", "line": {"color": DOUBT, "width": 1.5}},
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.25, margin={"b": 84})
    figure.update_xaxes(
        title_text="step", type="category", categoryorder="array", categoryarray=rows["step"].astype(str).tolist()
    )
    figure.update_yaxes(title_text="µs")
    notes = [f"rank {rank}, profiled captures"] + [f"the first {MAX_STEPS} of {len(table)} steps"] * (
        len(table) > MAX_STEPS
    )
    notes += [
        f"⚠ step{'s' * (len(mine) > 1)} {', '.join(map(str, mine['step'].head(8)))} withheld: {why}"
        for why, mine in lost.groupby("withheld", sort=False)
    ]
    return titled(figure, title, " · ".join(notes), height=340)
