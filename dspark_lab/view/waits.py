"""`waits`: where the host stood still, by kind and site, a bar an arm; and the table it is of."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from dspark_lab.runs.record import Run, as_runs
from dspark_lab.view import doubts
from dspark_lab.view.rows import arm_of, records
from dspark_lab.view.source import one_rank, open_cached
from dspark_lab.view.theme import fill, joined, message, titled

COLUMNS = ["arm", "kind", "name", "site", "times_per_step", "us_per_step"]
KINDS = {
    "sync": ("wait", "synchronise"),
    "event_wait": ("event wait", "event wait"),
    "blocking_copy": ("copy", "blocking copy"),
}
SKIP = 2
"""Steps left out at the start, as everywhere: the first is cold and the second still drains it. The last is left out too: the
synchronise that ends a capture falls into it."""
NO_GPU = "Without a GPU there is nothing that the host could wait for: no copy, no stream, no event."


def waits_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each arm, kind, call and site: times and µs a step in the capture of the lowest rank, the longest of an arm first."""
    parts = [_of(run) for run in runs if run.trace_paths]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=COLUMNS)


def _of(run: Run) -> pd.DataFrame:
    trace = one_rank(open_cached(run))
    steps = list(trace.steps()["step"])
    steps = steps[SKIP:-1] or steps
    rows = trace.waits()
    rows = rows[rows["step"].isin(steps)]
    if not len(rows):
        return pd.DataFrame(columns=COLUMNS)
    by = rows.groupby(["kind", "name", "site"], as_index=False, sort=False)["dur_us"].agg(["size", "sum"])
    table = by.assign(arm=arm_of(run), times_per_step=by["size"] / len(steps), us_per_step=by["sum"] / len(steps))
    return table.sort_values("us_per_step", ascending=False, ignore_index=True)[COLUMNS]


def waits(runs: Run | Sequence[Run], *, title: str = "Host waits a step") -> go.Figure:
    """Time that the host waits in a step of each arm's capture (profiled), stacked by kind; a box is a call at its site.

    Waits for an event of an earlier step, which running ahead needs, are dotted; the others hold the host up.
    """
    runs = as_runs(runs)
    with_trace = [r for r in runs if r.trace_paths]
    if not with_trace:
        return message(title, "No capture in these runs, so nothing is known of their waits.")
    if all(r.device == "cpu" for r in with_trace):
        return message(title, NO_GPU)
    table = waits_table(with_trace)
    figure, arms = go.Figure(), [arm_of(r) for r in with_trace]
    for kind, (colour, name) in KINDS.items():
        rows = table[table["kind"] == kind]
        if len(rows):
            said = [
                f"{r['arm']}: {r['name']}<br>{r['site']}<br>{r['times_per_step']:.1f} a step" for r in records(rows)
            ]
            figure.add_bar(
                x=rows["us_per_step"], y=rows["arm"], orientation="h", width=0.5, name=name, marker=fill(colour), hovertext=said,
                hovertemplate="%{hovertext}, %{x:,.1f} µs a step<extra></extra>",
            )  # fmt: skip
    totals = table.groupby("arm")["us_per_step"].sum()
    for arm in arms:
        total = float(totals.get(arm, 0.0))
        figure.add_annotation(
            x=total, y=arm, text=f"{total:,.0f} µs".replace(",", " "), showarrow=False, xanchor="left", xshift=6
        )
    figure.update_xaxes(
        title_text="µs a step that the host waits",
        range=[0, max(float(totals.max() if len(totals) else 0.0), 1.0) * 1.15],
    )
    figure.update_yaxes(categoryorder="array", categoryarray=arms[::-1], fixedrange=True, range=[-0.6, len(arms) - 0.4])
    figure.update_layout(barmode="stack", showlegend=True, margin={"b": 84})
    without = [arm_of(r) for r in runs if not r.trace_paths]
    notes = [f"no capture of: {', '.join(without)}"] * bool(without)
    notes += doubts.notes({arm_of(r): one_rank(open_cached(r)) for r in with_trace})
    label = joined(r.label.rsplit(", ", 1)[0] + ", profiled" for r in with_trace)
    return titled(figure, title, " · ".join([label, *notes]), height=150 + 34 * len(arms))
