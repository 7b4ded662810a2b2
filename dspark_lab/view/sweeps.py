"""`host_work`: the step as the host has more to do. `launch_lead`: how far the host runs ahead of the device. And their tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.analysis.intervals import Interval, block_medians, step_interval, t_interval
from dspark_lab.config import ALLOCS
from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run, as_runs
from dspark_lab.trace import open_trace
from dspark_lab.view.rows import FEW, arm_of
from dspark_lab.view.source import one_rank, trace_label
from dspark_lab.view.theme import COLOURS, FAINT, INK, joined, message, signed, stroke, titled

SKIP = 2
"""Steps left out at the start of a capture, as everywhere: the first is cold and the second still drains it."""
ARM_COLOURS = {"blocking": COLOURS["wait"], "none": COLOURS["compute"]}
OTHERS = [COLOURS[k] for k in ("draft", "copy", "communication", "verify", "host")]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_FREE = ("alloc", "mask_padding", "max_new_tokens", "host_work_us")
_SAID = {"preset": "{}", "tp_size": "TP{}", "batch_size": "batch {}", "host_work_us": "host work {:g} µs", "use_graph": "graphs {}"}  # fmt: skip
"""Toggles that tell captures apart, besides the arm, and how they are said."""


# -- the step against host work ------------------------------------------------------------------------------------


def host_work_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a process: arm, host_work_us, process, step_us (median of its unprofiled steps, from the third of a block on).

    Raises `LabError` where runs differ in more than arm and host work: one line through them would say nothing.
    """
    runs = as_runs(runs)
    flat = [run.config.to_dict() for run in runs]
    for toggle in sorted(set().union(*flat) - set(_FREE)):
        values = list(dict.fromkeys(shown(f.get(toggle)) for f in flat))
        if len(values) > 1:
            raise LabError(
                f"runs differ in {toggle} ({', '.join(values[:4])}), not only in alloc and host_work_us; pick those of one value."
            )
    rows = [
        {"arm": arm_of(run), "host_work_us": run.config.engine.host_work_us, "process": process, "step_us": us}
        for run in sorted(runs, key=_order)
        if run.role == "arm"
        for process, us in block_medians(run).groupby(level="process").mean().items()
    ]
    return pd.DataFrame(rows, columns=["arm", "host_work_us", "process", "step_us"])


def host_work_slopes(runs: Sequence[Run]) -> dict[str, Interval]:
    """By arm, µs of step for each µs of host work: least squares over the processes, with the slope's 95 % interval."""
    table = host_work_table(runs)
    slopes = {str(arm): _slope(rows) for arm, rows in table.groupby("arm", sort=False)}
    return {arm: slope for arm, slope in slopes.items() if not math.isnan(slope.mean)}


def _slope(rows: pd.DataFrame) -> Interval:
    """Least squares, with a jackknife over the processes for the interval."""
    x, y = rows["host_work_us"].to_numpy(dtype=float), rows["step_us"].to_numpy(dtype=float)
    n = len(x)
    if len(np.unique(x)) < 2:
        return Interval(math.nan, math.nan, math.nan, n)
    slope = _fit(x, y)[0]
    left_out = [np.delete(np.arange(n), i) for i in range(n)]
    if any(len(np.unique(x[keep])) < 2 for keep in left_out):
        return Interval(slope, math.nan, math.nan, n)
    pseudo = t_interval(np.array([n * slope - (n - 1) * _fit(x[keep], y[keep])[0] for keep in left_out]))
    half = pseudo.high - pseudo.mean
    return Interval(slope, slope - half, slope + half, n)


def _fit(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope, and height at 0."""
    slope, at_zero = np.polyfit(x, y, 1)
    return float(slope), float(at_zero)


def host_work(runs: Sequence[Run], *, title: str = "Step against host work") -> go.Figure:
    """Unprofiled step against ``host_work_us``: a point a process, a line fitted over them, its slope in the legend.

    Runs must differ in nothing else but the arm. Arms at one value of it only are left out, and the label says so. Bars are
    95 % intervals, where a value was measured in three processes or more.
    """
    arms = [r for r in as_runs(runs) if r.role == "arm" and len(r.step_us())]
    if not arms:
        return message(title, "No unprofiled steps in these runs.")
    other = sorted(k for k, v in arms[0].config.to_dict().items() if k not in _FREE and any(r.config.to_dict()[k] != v for r in arms))  # fmt: skip
    if other:
        return message(title, f"These runs differ in more than the arm and host_work_us: {', '.join(other)}.")
    slopes, table = host_work_slopes(arms), host_work_table(arms)
    if not slopes:
        return message(title, "Every arm was measured at one value of host_work_us only.")
    figure = go.Figure()
    for at, (arm, slope) in enumerate(slopes.items()):
        of = [r for r in arms if arm_of(r) == arm]
        _line(figure, table[table["arm"] == arm], of, _slope_text(arm, slope), at)
    figure.update_xaxes(title_text="host_work_us: busy host time after the scalar's place, µs")
    figure.update_yaxes(title_text="step, ms", rangemode="tozero")
    figure.update_layout(showlegend=True, margin={"b": 84})
    without = [a for a in dict.fromkeys(arm_of(r) for r in arms) if a not in slopes]
    notes = [f"at one value only: {', '.join(without)}"] * bool(without)
    label = joined(r.label for r in arms if arm_of(r) in slopes)
    return titled(figure, title, " · ".join([label, "a point a process", *notes]), height=400)


def _slope_text(arm: str, slope: Interval) -> str:
    digits = 2 if abs(slope.mean) >= 0.1 else 3
    half = "" if math.isnan(slope.low) else f" ± {slope.high - slope.mean:.{digits}f}"
    return f"{arm}: {signed(slope.mean, digits)}{half} µs a µs"


def _line(figure: go.Figure, rows: pd.DataFrame, runs: Sequence[Run], name: str, at: int) -> None:
    """One arm: the fitted line, the points of its processes, and the intervals."""
    colour, look = _colour(arm_of(runs[0]), at), stroke(runs[0].shown_source)
    slope, at_zero = _fit(rows["host_work_us"].to_numpy(dtype=float), rows["step_us"].to_numpy(dtype=float))
    ends = np.array([rows["host_work_us"].min(), rows["host_work_us"].max()])
    figure.add_scatter(
        x=ends, y=(at_zero + slope * ends) / 1e3, mode="lines", name=name, legendgroup=name, hoverinfo="skip",
        line={"color": colour, "width": 2, "dash": DASHES[at % len(DASHES)]},
    )  # fmt: skip
    figure.add_scatter(
        x=rows["host_work_us"], y=rows["step_us"] / 1e3, mode="markers", name=name, legendgroup=name, showlegend=False,
        marker={"size": 9, "symbol": look["symbol"], "color": colour, "line": {"width": 2, "color": colour}}, customdata=rows["process"],
        hovertemplate="%{y:.3f} ms at %{x:g} µs, process %{customdata}<extra></extra>",
    )  # fmt: skip
    for run in runs:
        step = step_interval(run)
        if step.n >= FEW:
            figure.add_scatter(
                x=[run.config.engine.host_work_us] * 2, y=[step.low, step.high], mode="lines", legendgroup=name, showlegend=False,
                line={"color": colour, "width": 6}, opacity=0.35,
                hovertemplate=f"95 % interval of {step.n} processes: {step.low:.3f} to {step.high:.3f} ms<extra></extra>",
            )  # fmt: skip


def _colour(arm: str, at: int) -> str:
    return ARM_COLOURS.get(arm, OTHERS[at % len(OTHERS)])


# -- the lead of the first launch ----------------------------------------------------------------------------------


def launch_lead_table(captures: Mapping[str, Any] | Sequence[Run]) -> pd.DataFrame:
    """A row a step and rank of each capture, from the third on: what it is called, arm, rank, step, launch_lead_us."""
    parts = [
        t.steps().iloc[SKIP:][["step", "launch_lead_us"]].assign(name=name, arm=arm, rank=t.rank)
        for name, (arm, traces, _) in _opened(captures).items()
        for t in traces
    ]
    columns = ["name", "arm", "rank", "step", "launch_lead_us"]
    return pd.concat(parts, ignore_index=True)[columns].dropna() if parts else pd.DataFrame(columns=columns)


def launch_lead(
    captures: Mapping[str, Any] | Sequence[Run], *, title: str = "Launch lead: how far the host is ahead"
) -> go.Figure:
    """Start of a step's first graph kernel minus the end of the call that launched it: a point a step and rank, the median a dash.

    Above zero the host runs ahead and the device never waits for it. At zero and below, the kernel starts as soon as it is
    launched, or while it is: the device had run dry. ``captures``: name to trace (or ranks), or runs; those without a capture
    are named in the label. Captures are profiled.
    """
    opened = _opened(captures)
    table = launch_lead_table(captures)
    if not len(table):
        return message(title, "No capture with launches on a device, so there is no lead to show.")
    names = list(dict.fromkeys(table["name"]))
    figure = go.Figure()
    for at, name in enumerate(names):
        _leads(figure, at, table[table["name"] == name])
    low, high = float(table["launch_lead_us"].min()) / 1e3, float(table["launch_lead_us"].max()) / 1e3
    room = max(high - low, 0.1)
    span = [min(low, 0.0) - 0.14 * room, max(high, 0.0) + 0.14 * room]
    _zero(figure, span, len(names))
    figure.update_xaxes(
        tickvals=list(range(len(names))), ticktext=[n.replace(", ", "<br>") for n in names], tickangle=0,
        range=[-0.6, len(names) - 0.4], fixedrange=True,
    )  # fmt: skip
    figure.update_yaxes(title_text="launch lead, ms", range=span, zeroline=False)
    figure.update_layout(showlegend=False)
    without = [n for n in opened if n not in names]
    if not isinstance(captures, Mapping):
        drawn = {arm for arm, _, _ in opened.values()}
        without += [arm_of(r) for r in as_runs(captures) if r.role == "arm" and arm_of(r) not in drawn]
    notes = [f"no capture of: {', '.join(dict.fromkeys(without))}"] * bool(without)
    return titled(figure, title, " · ".join([joined(label for _, _, label in opened.values()), *notes]), height=400)


def _leads(figure: go.Figure, at: int, rows: pd.DataFrame) -> None:
    """One capture's steps from left to right, a rank beside the other, and its median: the mean of the ranks'."""
    arm, ranks = str(rows["arm"].iloc[0]), sorted(set(rows["rank"]))
    colour = _colour(arm, at)
    for k, rank in enumerate(ranks):
        of = rows[rows["rank"] == rank]
        left, right = -0.3 + 0.6 * k / len(ranks), -0.3 + 0.6 * (k + 1) / len(ranks)
        figure.add_scatter(
            x=at + np.linspace(left + 0.02, right - 0.02, len(of)), y=of["launch_lead_us"] / 1e3, mode="markers",
            marker={"size": 5, "symbol": "circle-open", "color": colour, "opacity": 0.7}, customdata=of["step"],
            hovertemplate=f"{arm}: %{{y:.3f}} ms<br>step %{{customdata}}, rank {rank}<extra></extra>",
        )  # fmt: skip
    mid = float(rows.groupby("rank")["launch_lead_us"].median().mean())
    figure.add_scatter(
        x=[at - 0.34, at + 0.34], y=[mid / 1e3] * 2, mode="lines", line={"color": INK, "width": 2},
        hovertemplate=f"{arm}: median {mid:,.1f} µs<extra></extra>",
    )  # fmt: skip
    text = f"<b>{signed(mid / 1e3, 2)} ms</b>" if abs(mid) >= 1000 else f"<b>{signed(mid, 0)} µs</b>"
    figure.add_annotation(
        x=at + 0.34, y=mid / 1e3, text=text, showarrow=False, xanchor="right", yanchor="bottom", yshift=4, bgcolor="rgba(255,255,255,0.4)"
    )  # fmt: skip


def _zero(figure: go.Figure, span: list[float], count: int) -> None:
    """The line at zero, and what lies on either side of it in words."""
    figure.add_shape(
        type="rect", x0=-0.6, x1=count - 0.4, y0=span[0], y1=0, fillcolor=COLOURS["wait"], opacity=0.08, line_width=0, layer="below"
    )  # fmt: skip
    figure.add_shape(type="line", x0=-0.6, x1=count - 0.4, y0=0, y1=0, line={"color": INK, "width": 1.5})
    words = {"font": {"color": FAINT, "size": 11}, "showarrow": False, "x": -0.57, "xanchor": "left"}
    figure.add_annotation(y=span[1], text="above: the host runs ahead", yanchor="top", **words)
    figure.add_annotation(y=span[0], text="at zero and below: the device waits for the host", yanchor="bottom", **words)


def _opened(captures: Mapping[str, Any] | Sequence[Run]) -> dict[str, tuple[str, list[Any], str]]:
    """Name to arm, traces of its ranks, and label."""
    if isinstance(captures, Mapping):
        return {n: (n, ranks, trace_label(ranks[0])) for n, ranks in ((n, _ranks(t)) for n, t in captures.items())}
    runs = sorted((r for r in as_runs(captures) if r.role == "arm" and r.trace_paths), key=_order)
    out: dict[str, tuple[str, list[Any], str]] = {}
    for name, run in zip(_names(runs), runs, strict=True):
        out[name] = (arm_of(run), _ranks(open_trace(run)), run.label.rsplit(", ", 1)[0] + ", profiled")
    return out


def _order(run: Run) -> tuple[Any, ...]:
    """What was measured beside each other together, arms in the order of their history."""
    flat, alloc = run.config.to_dict(), run.config.engine.alloc
    return (*(flat[k] for k in _SAID), list(ALLOCS).index(alloc) if alloc in ALLOCS else len(ALLOCS))


def _names(runs: Sequence[Run]) -> list[str]:
    """The arm, with the toggles in which these runs differ; where that is not enough, the run's own name."""
    flat = [r.config.to_dict() for r in runs]
    differ = [k for k in _SAID if len({f[k] for f in flat}) > 1]
    names = [", ".join([arm_of(r), *(_SAID[k].format(f[k]) for k in differ)]) for r, f in zip(runs, flat, strict=True)]
    return names if len(set(names)) == len(names) else [r.name for r in runs]


def _ranks(opened: Any) -> list[Any]:
    one_rank(opened)  # or it is no trace, and that is said
    return [opened] if hasattr(opened, "events") else list(cast("Mapping[int, Any]", opened).values())
