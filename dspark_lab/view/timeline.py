"""`timeline`: steps of one trace as a figure, rows as in `browse`: threads, graph replays, streams. A value that needs no kernel to be looked at."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dspark_lab.trace import Trace
from dspark_lab.trace.span import StepRange
from dspark_lab.view.browse.detail import Boxes, look
from dspark_lab.view.browse.scene import Scene, scene
from dspark_lab.view.browse.tracks import COLOUR_NAMES
from dspark_lab.view.lanes import short
from dspark_lab.view.rows import records
from dspark_lab.view.source import one_rank, trace_label
from dspark_lab.view.theme import COLOURS, FAINT, HATCHED, TOP, fill, message, titled

LIMIT = 4000
"""Boxes drawn; over that, cells in which events are merged grow, and the figure says so."""
NAMES = {
    "wait": "host blocked",
    "event wait": "host waits for an event",
    "host": "host calls",
    "op": "ops",
    "graph": "graph replay",
    "step": "step",
}
PLAIN = {"op": "#C3CAD6", "graph": "#5F6C80", "step": "#E5E7EB"}
CPU_NOTE = "no GPU: phases and ops by thread"
THICK = 0.7
DOUBT = "#B34700"


def timeline(
    trace: Any, *, steps: slice | int | None = slice(2, 5), title: str = "Timeline", label: str = ""
) -> go.Figure:
    """The steps ``steps`` (by step number; None: all) of a trace: steps, phases and calls of each thread, graph replays, streams.

    Compute, communication and copies are coloured, waits of the host are hatched and name their site. Where there are more events than can be
    drawn, those of a cell are one box as high as the share of it that is busy. Steps without a whole record on the device are marked. A trace
    without device events shows phases and ops by thread. To zoom in a large trace: `lab.browse`. Raises `LabError` for what is no trace.
    """
    wanted = StepRange.of(steps)
    trace = one_rank(trace)
    window = _window(trace, wanted)
    if window is None:
        why = wanted.none_of(trace.step_windows.labels) if len(trace.events) else "the trace holds no events to draw."
        return message(title, f"{str(why)[:1].upper()}{str(why)[1:]}")
    drawn = scene({"": trace})
    zero = drawn.groups[0].zero_ns
    lo, hi = window[0] - zero, window[1] - zero
    boxes, cell = look([t.row for t in drawn.tracks], lo, hi, pixels=None, limit=LIMIT)
    if not len(boxes):
        return message(title, f"No event in {_shown(wanted)}.")
    notes = [label or trace_label(trace), _shown(wanted)] + [CPU_NOTE] * trace.is_cpu_only
    if boxes.merged.any():
        notes.append(
            f"{int(boxes.count.sum()):,} events as {len(boxes):,} boxes: those within {cell / 1e3:.1f} µs are merged, as high as they are busy; fewer steps show more"
        )
    notes += [f"⚠ {d}" for d in drawn.groups[0].doubts[:2]]
    figure = _drawn(drawn, boxes, lo)
    span = (hi - lo) / 1e6
    figure.update_xaxes(range=[-0.01 * span, 1.01 * span])
    _step_lines(figure, drawn, lo, hi)
    _bands(figure, drawn, lo, hi)
    return titled(figure, title, " · ".join(notes), height=164 + 34 * len(drawn.tracks))


def _shown(steps: StepRange) -> str:
    if steps == StepRange():
        return "all steps"
    first = steps.first or 0
    if steps.end is None:
        return f"steps from {first} on"
    return f"step {first}" if steps.end - first == 1 else f"steps {first} to {steps.end - 1}"


def _window(trace: Trace, steps: StepRange) -> tuple[int, int] | None:
    """(first ns, last ns) of the chosen steps: from their first host or device event to their last."""
    rows = trace.steps()
    if not len(trace.events):
        return None
    if not len(rows) or steps == StepRange():
        return trace.t0_ns, trace.t1_ns
    mine = rows[steps.holds(rows["step"].to_numpy())]
    if not len(mine):
        return None
    ends = [mine["host_end_ns"].max()]
    if not trace.is_cpu_only:
        on_device = mine[mine["device_start_ns"].notna() & (mine["device_start_ns"] > 0) & mine["period_us"].notna()]
        ends += list(on_device["device_start_ns"] + on_device["period_us"] * 1e3)
    return int(mine["host_start_ns"].min()), int(max(ends))


def _drawn(of: Scene, boxes: Boxes, zero: int) -> go.Figure:
    """One bar trace a colour on a linear axis in ms; widths are durations, heights of merged boxes the share that is busy."""
    figure = go.Figure()
    said = _hovers(of, boxes)
    share = np.where(boxes.merged, np.maximum(boxes.share, 0.08), 1.0)
    order = [*COLOURS, "event wait", "op", "graph", "step"]
    for name in sorted((COLOUR_NAMES[c] for c in np.unique(boxes.colour)), key=order.index):
        mine = np.flatnonzero(boxes.colour == COLOUR_NAMES.index(name))
        mine = mine[np.argsort(~boxes.merged[mine], kind="stable")]  # what is merged lies under what is not
        plain = {"color": PLAIN.get(name) or COLOURS.get(name), "line": {"width": 0}}
        figure.add_bar(
            x=(boxes.end[mine] - boxes.start[mine]) / 1e6, base=(boxes.start[mine] - zero) / 1e6,
            y=boxes.row[mine] + THICK * (1 - share[mine]) / 2, width=THICK * share[mine],  # they stand on the row's lower edge
            orientation="h", name=NAMES.get(name, name), marker=fill(name) if name in HATCHED or (len(mine) < 200 and name not in PLAIN) else plain,
            hovertext=[said[i] for i in mine], customdata=np.round((boxes.end[mine] - boxes.start[mine]) / 1e3, 2),
            hovertemplate="%{hovertext}<br>%{customdata} µs, from %{base:.4f} ms<extra></extra>",
        )  # fmt: skip
    n = len(of.tracks)
    figure.update_yaxes(
        tickvals=list(range(n)), ticktext=[t.label for t in of.tracks], range=[n - 0.4, -0.6], fixedrange=True
    )
    figure.update_xaxes(title_text="ms since the first step shown began on the host", zeroline=False)
    figure.update_layout(barmode="overlay", margin={"t": TOP + 16, "b": 96})
    return figure


def _hovers(of: Scene, boxes: Boxes) -> list[str]:
    """A few words on each box: its name, the wait it is with its site, or how many it stands for."""
    waits = {(r["track"], r["at"]): r["text"] for r in records(of.flags)}
    out = []
    for row, start, name, count, share in zip(boxes.row.tolist(), boxes.start.tolist(), boxes.name.tolist(), boxes.count.tolist(), boxes.share.tolist(), strict=True):  # fmt: skip
        if name < 0:
            out.append(f"{count:,} events merged, busy {share:.0%}")
        elif (row, start) in waits:
            out.append(f"waits in {waits[row, start]}")
        else:
            out.append(short(str(of.names[name])))
    return out


def _step_lines(figure: go.Figure, of: Scene, lo: int, hi: int) -> None:
    """A dotted line where each step begins on its clock: the device's, or the host's without one."""
    rows = of.steps[((of.steps["at"] >= lo) & (of.steps["at"] <= hi)).to_numpy()]
    for s in records(rows.head(40)):
        x = (s["at"] - lo) / 1e6
        figure.add_vline(x=x, line={"color": "#9CA3AF", "width": 1, "dash": "dot"})
        figure.add_annotation(x=x, y=1, yref="paper", yanchor="bottom", xanchor="left", text=f"step {s['step']}", showarrow=False,
                              font={"size": 10, "color": FAINT})  # fmt: skip


def _bands(figure: go.Figure, of: Scene, lo: int, hi: int) -> None:
    """Steps whose record on the device is not whole: what looks idle there is none."""
    first = next((i for i, t in enumerate(of.tracks) if t.kind in ("graphs", "stream")), len(of.tracks) - 1)
    for a, b, why in [x for x in of.groups[0].bands if x[1] > lo and x[0] < hi][:40]:
        left, right = (max(a, lo) - lo) / 1e6, (min(b, hi) - lo) / 1e6
        figure.add_shape(type="rect", x0=left, x1=right, y0=first - 0.45, y1=len(of.tracks) - 0.5, line={"color": DOUBT, "dash": "dash", "width": 1},
                         fillcolor=DOUBT, opacity=0.14)  # fmt: skip
        figure.add_annotation(x=left, y=first - 0.45, text=f"⚠ {textwrap.shorten(why, 44, placeholder='…')}", showarrow=False, xanchor="left", yanchor="bottom",
                              font={"size": 10, "color": DOUBT}, bgcolor="rgba(255,255,255,0.85)")  # fmt: skip
