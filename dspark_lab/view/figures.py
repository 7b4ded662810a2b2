"""Figures of runs, as values: `latency`, `comparison`, `acceptance`; and of traces: `timeline`, `step_strip`, `causes`, `edits`, `step_parts`. Nothing shows itself.

These are the values of ``lab.plot``. Each figure carries one line with source, device, date and whether steps were profiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run, as_runs
from dspark_lab.view.causes import causes, edits, step_parts
from dspark_lab.view.curves import training_curves
from dspark_lab.view.depths import depth_sweep
from dspark_lab.view.drafting import accept_length_sweep, accepted_by_position, reliability, verify_budget
from dspark_lab.view.ep import ep_lanes, ep_sweep, ep_traffic, expert_heatmap
from dspark_lab.view.rows import TOO_FEW, arm_of, by_arm, is_few
from dspark_lab.view.schedules import break_even, budget_worth, step_costs, verify_lengths
from dspark_lab.view.strip import step_strip
from dspark_lab.view.sweeps import host_work, launch_lead
from dspark_lab.view.theme import COLOURS, FAINT, INK, joined, message, signed, stroke, titled
from dspark_lab.view.timeline import timeline
from dspark_lab.view.waits import waits

__all__ = [
    "accept_length_sweep", "acceptance", "accepted_by_position", "break_even", "budget_worth", "causes", "comparison", "depth_sweep", "edits", "ep_lanes", "ep_sweep", "ep_traffic", "expert_heatmap", "host_work", "latency", "launch_lead", "reliability", "step_costs", "step_parts", "step_strip", "timeline", "training_curves", "verify_budget", "verify_lengths", "waits",
]  # fmt: skip


def __dir__() -> list[str]:
    """What a notebook lists behind ``lab.plot.``: figures alone."""
    return __all__


MAX_POINTS = 1500
"""Points drawn of one run; more are thinned evenly, and the figure says so."""


def latency(runs: Run | Sequence[Run], *, title: str = "Step latency") -> go.Figure:
    """Unprofiled steps of each run: every step a point, the median of each process a dash, the median of all a line."""
    runs = as_runs(runs)
    if not runs:
        return message(title, "No runs to show.")
    figure = go.Figure()
    thinned = False
    for at, run in enumerate(runs):
        thinned |= _steps(figure, at, run)
        _median(figure, at, run)
    names = _names(runs)
    figure.update_xaxes(tickvals=list(range(len(runs))), ticktext=names, range=[-0.6, len(runs) - 0.4], fixedrange=True)
    span, above = _span(runs)
    figure.update_yaxes(title_text="step, ms", range=span)
    figure.update_layout(showlegend=False)
    notes = [joined(r.label for r in runs)]
    notes += [f"points thinned to {MAX_POINTS:,} a run"] * thinned
    notes += [f"{above} step{'s' * (above > 1)} above the picture: zoom out"] * bool(above)
    return titled(figure, title, " · ".join(notes))


def _span(runs: Sequence[Run]) -> tuple[list[float] | None, int]:
    """Range of the axis in ms, at least 6 % around the medians so that little looks little; and how many steps lie above."""
    mids = [r.step_ms_p50 for r in runs if not math.isnan(r.step_ms_p50)]
    steps = np.concatenate([r.step_us()["step_us"].to_numpy() / 1e3 for r in runs])
    if not mids:
        return None, 0
    low, high = min(mids) * 0.94, max(mids) * 1.06
    if len(steps):
        low, high = min(low, float(steps.min())), max(high, float(np.percentile(steps, 99)))
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    return [low, high], int((steps > high).sum())


def _steps(figure: go.Figure, at: int, run: Run) -> bool:
    """Points of one run, in order from left to right; True if thinned."""
    rows = run.step_us()
    if not len(rows):
        return False
    keep = rows if len(rows) <= MAX_POINTS else rows.iloc[np.linspace(0, len(rows) - 1, MAX_POINTS).astype(int)]
    x = at + np.linspace(-0.32, 0.32, len(keep))
    look = stroke(run.shown_source)
    figure.add_scatter(
        x=x, y=keep["step_us"] / 1e3, mode="markers", name=run.name,
        marker={"size": 4, "symbol": look["symbol"], "color": COLOURS["host"], "opacity": 0.55},
        customdata=keep[["process", "repeat", "step"]].to_numpy(),
        hovertemplate="%{y:.3f} ms<br>process %{customdata[0]}, repeat %{customdata[1]}, step %{customdata[2]}<extra></extra>",
    )  # fmt: skip
    for _, block in keep.assign(x=x).groupby("process"):
        mid = float(block["step_us"].median()) / 1e3
        figure.add_scatter(
            x=[block["x"].min(), block["x"].max()], y=[mid, mid], mode="lines", line={"color": COLOURS["compute"], "width": 2},
            hovertemplate=f"process median {mid:.3f} ms<extra></extra>",
        )  # fmt: skip
    return len(keep) < len(rows)


def _median(figure: go.Figure, at: int, run: Run) -> None:
    """The run's median as a line with its value, or a note that there is none."""
    mid = run.step_ms_p50
    if math.isnan(mid):
        figure.add_annotation(
            x=at, y=0.5, yref="paper", text="no unprofiled steps", showarrow=False, font={"color": FAINT}
        )
        return
    summary = run.step_us().empty
    figure.add_scatter(
        x=[at - 0.4, at + 0.4], y=[mid, mid], mode="lines", line={"color": INK, "width": 2, "dash": stroke(run.shown_source)["dash"]},
        hovertemplate=f"{run.name}: median {mid:.3f} ms{', a kept summary' if summary else ''}<extra></extra>",
    )  # fmt: skip
    note = "<br><i>kept as a summary</i>" if summary else ""
    figure.add_annotation(x=at, y=mid, text=f"<b>{mid:.3f} ms</b>{note}", showarrow=False, yanchor="bottom", yshift=3,
                          bgcolor="rgba(255,255,255,0.8)")  # fmt: skip


def comparison(table: pd.DataFrame, *, title: str = "Strategies compared") -> go.Figure:
    """Medians of `lab.compare` with their intervals; the verdict against the baseline stands at the end of each bar."""
    if table is not None and not isinstance(table, pd.DataFrame):
        raise LabError(f"comparison takes a table, not a {type(table).__name__}; pass lab.compare(runs, by='alloc').")
    if table is None or not len(table):
        return message(title, "Nothing to compare: no arm has unprofiled steps.")
    by = str(table.columns[0])
    rows = [r for r in by_arm(table) if not _nan(r.get("step_ms_p50"))]
    if not rows:
        return message(title, "Nothing to compare: no arm has unprofiled steps.")
    names = [_row_name(r, by) for r in rows]
    figure = go.Figure()
    for name, r in zip(names, rows, strict=True):
        _bar(figure, name, r)
    top = max(_high(r) for r in rows)
    figure.update_xaxes(title_text="step, ms (median)", range=[0, top * 1.04])
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], fixedrange=True, range=[-0.5, len(rows) - 0.2]
    )
    figure.update_layout(showlegend=False, barmode="overlay")
    return titled(figure, title, joined(str(r.get("label", "")) for r in rows), height=112 + 46 * len(rows))


def _bar(figure: go.Figure, name: str, row: dict[str, Any]) -> None:
    mid, solid = float(row["step_ms_p50"]), stroke(str(row.get("source", "measured")))
    ci = row.get("step_ms_ci95")
    error = None
    if not _nan(ci):
        low, high = ci  # type: ignore[misc]
        error = {
            "type": "data",
            "symmetric": False,
            "array": [high - mid],
            "arrayminus": [mid - low],
            "color": INK,
            "thickness": 1.5,
        }
    host = COLOURS["host"]
    figure.add_bar(
        x=[mid], y=[name], orientation="h", width=0.4, error_x=error, name=name,
        marker={"color": host if solid["filled"] else "rgba(122,134,154,0.18)", "line": {"color": host, "width": 2}},
        hovertemplate=f"{name}: {mid:.3f} ms<br>{verdict_text(row)}<extra></extra>",
    )  # fmt: skip
    figure.add_annotation(
        x=0,
        y=name,
        text=f"<b>{mid:.3f} ms</b>  {verdict_text(row)}",
        showarrow=False,
        xanchor="left",
        xshift=2,
        yanchor="bottom",
        yshift=9,
    )  # above its bar: beside the longest one there is no room


def verdict_text(row: dict[str, Any]) -> str:
    """A row of `lab.compare` in words: ``▲ +2.2 % [1.8, 2.6] slower``."""
    verdict, delta, same = str(row.get("verdict", "")), row.get("delta_pct"), row.get("same_path_as")
    if not _nan(same) and same:
        return f"same code path as {same}"
    if verdict == "baseline" or _nan(delta):
        return verdict if verdict not in ("nan", "None") else ""
    arrow = {"slower": "▲", "faster": "▼"}.get(verdict, "≈")
    ci = row.get("delta_pct_ci95")
    if is_few(row):
        return f"≈ {signed(float(delta))} %, {TOO_FEW}"  # type: ignore[arg-type]
    between = "" if _nan(ci) else f" [{signed(ci[0])}, {signed(ci[1])}]"  # type: ignore[index]
    return f"{arrow} {signed(float(delta))} %{between} {verdict}"  # type: ignore[arg-type]


def acceptance(runs: Run | Sequence[Run], *, title: str = "Acceptance by position") -> go.Figure:
    """Share of rounds that accept draft position k, for each run; 1 + their sum is the accept length."""
    runs = as_runs(runs)
    known = [
        (name, r)
        for name, r in zip(_names(runs), runs, strict=True)
        if r.acceptance is not None and r.acceptance.num_rounds
    ]
    if not known:
        return message(title, "No acceptance was counted in these runs.")
    known = [(name, r) for name, r in known if r.config.gamma]
    if not known:
        return message(title, "These runs drafted nothing (speculate=False): every step is one token a request.")
    figure = go.Figure()
    for i, (name, run) in enumerate(known):
        acc = run.acceptance
        assert acc is not None
        p = acc.by_position
        simulated = acc.simulated or run.source == "simulated"
        figure.add_bar(
            x=list(range(1, len(p) + 1)), y=p, name=f"{name}: 1 + {sum(p):.2f} = {acc.accept_length:.2f}{' (simulated)' if simulated else ''}",
            marker={"color": COLOURS["accept"], "line": {"color": INK, "width": 1},
                    "pattern": {"shape": ["", "/", "\\", "x", "-", "|", "+"][i % 7], "fgcolor": INK, "fillmode": "overlay", "solidity": 0.15}},
            hovertemplate=f"{name}: position %{{x}}: %{{y:.3f}}, {acc.num_rounds} rounds<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="draft position k", dtick=1, fixedrange=True)
    figure.update_yaxes(title_text="accepted, share of rounds", range=[0, 1.05])
    figure.update_layout(
        barmode="group",
        showlegend=True,
        legend={
            "orientation": "v",
            "x": 1,
            "xref": "paper",
            "xanchor": "right",
            "y": 1,
            "yref": "paper",
            "yanchor": "top",
        },
    )
    label = joined(r.label for _, r in known) + " · accept length = 1 + Σ Pₖ, bonus token included"
    return titled(figure, title, label)


def _names(runs: Sequence[Run]) -> list[str]:
    """Short unique names: the `alloc` where those differ, else the run's name."""
    allocs = [arm_of(r) for r in runs]
    return allocs if len(set(allocs)) == len(allocs) else [r.name for r in runs]


def _row_name(row: dict[str, Any], by: str) -> str:
    return str(row.get(by, "?"))


def _high(row: dict[str, Any]) -> float:
    ci = row.get("step_ms_ci95")
    return float(row["step_ms_p50"]) if _nan(ci) else float(ci[1])  # type: ignore[index]


def _nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
