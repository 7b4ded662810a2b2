"""`timeline`: the steps of one trace as lanes, host threads over device streams, with waits, phases, copies and graph launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.errors import LabError
from dspark_lab.view import lanes
from dspark_lab.view.rows import records
from dspark_lab.view.source import one_rank, trace_label
from dspark_lab.view.strip import site
from dspark_lab.view.theme import COLOURS, HATCHED, TOP, fill, message, titled

LIMIT = 4000
"""Boxes drawn; over that, tiny neighbours of a lane are merged and the figure says so."""
COLUMNS = ["lane", "start_ns", "dur_ns", "colour", "name"]
NAMES = {"wait": "host blocked", "event wait": "host waits for an event", "host": "host calls"}
CPU_NOTE = "no GPU: phases and ops by thread"


def timeline(trace: Any, *, steps: slice | None = slice(2, 5), title: str = "Timeline", label: str = "") -> go.Figure:
    """The steps ``steps`` (by step number; None: all) of a trace, a lane for each thread, its phases and each stream.

    Compute, communication and copies are coloured, waits of the host are hatched and name their site, draft, verify and accept
    have a lane of their own. A trace without device events shows phases and ops by thread.
    """
    if steps is not None and not _is_span(steps):
        raise LabError(f"steps={steps!r} is no range of steps; pass steps=slice(first, end), or None for all.")
    trace = one_rank(trace)
    window = _window(trace, steps)
    label = label or trace_label(trace)
    if window is None:
        return message(
            title, "The trace holds no events to draw." if not len(trace.events) else f"No step in {_said(steps)}."
        )
    boxes = _boxes(trace, *window)
    if not len(boxes):
        return message(title, f"No event in {_said(steps)}.")
    shown, gap_ns = lanes.merged(boxes, ["lane", "colour"], limit=LIMIT)
    notes = [label, _said(steps)]
    if trace.is_cpu_only:
        notes.append(CPU_NOTE)
    if gap_ns:
        notes.append(
            f"{len(boxes):,} events as {len(shown):,} boxes: those less than {gap_ns / 1e3:.1f} µs apart are merged; fewer steps show more"
        )
    figure = _drawn(shown, window[0])
    span = (window[1] - window[0]) / 1e6
    figure.update_xaxes(range=[-0.01 * span, 1.01 * span])
    _step_lines(figure, trace, *window)
    lane_count = shown["lane"].nunique()
    return titled(figure, title, " · ".join(notes), height=164 + 40 * lane_count)


def _is_span(steps: Any) -> bool:
    return isinstance(steps, slice) and all(n is None or isinstance(n, int) for n in (steps.start, steps.stop))


def _said(steps: slice | None) -> str:
    if steps is None or (steps.start is None and steps.stop is None):
        return "all steps"
    first = steps.start or 0
    if steps.stop is None:
        return f"steps from {first} on"
    return f"step {first}" if steps.stop - first == 1 else f"steps {first} to {steps.stop - 1}"


def _window(trace: Any, steps: slice | None) -> tuple[int, int] | None:
    """(first ns, last ns) of the chosen steps: from their first host or device event to their last."""
    rows = trace.steps()
    if not len(trace.events):
        return None
    if not len(rows) or steps is None:
        ends = trace.events["ts_ns"] + trace.events["dur_ns"]
        return int(trace.events["ts_ns"].min()), int(ends.max())
    low = rows["step"].iloc[0] if steps.start is None else steps.start
    mine = rows[rows["step"] >= low]
    if steps.stop is not None:
        mine = mine[mine["step"] < steps.stop]
    if not len(mine):
        return None
    start = mine["host_start_ns"].min()
    ends = [mine["host_end_ns"].max()]
    if not trace.is_cpu_only:
        on_device = mine[mine["device_start_ns"].notna() & (mine["device_start_ns"] > 0)]
        ends += list(on_device["device_start_ns"] + on_device["period_us"] * 1e3)
    return int(start), int(max(ends))


def _boxes(trace: Any, lo: int, hi: int) -> pd.DataFrame:
    events = trace.events
    events = events[(events["ts_ns"] < hi) & (events["ts_ns"] + events["dur_ns"] > lo)]
    parts = [_phases(trace, lo, hi), _threads(trace, events, lo, hi), _streams(events)]
    parts = [p for p in parts if len(p)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=COLUMNS)


def _phases(trace: Any, lo: int, hi: int) -> pd.DataFrame:
    found = []
    for s in records(lanes.phase_spans(trace)):
        name = f"step {s['step']}: {s['phase']}"
        for lane, a, b in (
            ("host phases", "host_start_ns", "host_end_ns"),
            ("device phases", "device_start_ns", "device_end_ns"),
        ):
            if s[a] > 0 and s[a] < hi and s[b] > lo:
                found.append(
                    (
                        lane,
                        s[a],
                        s[b] - s[a],
                        s["phase"],
                        f"{name} {'launched' if a[0] == 'h' and s['device_start_ns'] > 0 else ''}",
                    )
                )
    return pd.DataFrame(found, columns=COLUMNS)


def _threads(trace: Any, events: pd.DataFrame, lo: int, hi: int) -> pd.DataFrame:
    """Runtime calls by thread, host waits over them; ops too where there is no device to look at."""
    calls = lanes.runtime_boxes(events)
    waits = trace.waits()
    waits = waits[(waits["ts_ns"] < hi) & (waits["ts_ns"] + waits["dur_us"] * 1e3 > lo)]
    calls = calls[~calls["start_ns"].isin(waits["ts_ns"])]
    parts = [_lane(calls["tid"], calls["start_ns"], calls["dur_ns"], "host", calls["name"])]
    if len(waits):
        owner = events[events["category"].isin(lanes.RUNTIME)].drop_duplicates("ts_ns").set_index("ts_ns")["tid"]
        main = calls["tid"].mode().iloc[0] if len(calls) else 0
        tids = waits["ts_ns"].map(owner).fillna(main).astype("int64")
        names = [_wait_name(w) for w in records(waits)]
        kind = np.where(waits["kind"] == "event_wait", "event wait", "wait")
        parts.append(_lane(tids, waits["ts_ns"], (waits["dur_us"] * 1e3).astype("int64"), kind, names))
    if trace.is_cpu_only:
        ops = lanes.op_boxes(events)
        parts.append(_lane(ops["tid"], ops["start_ns"], ops["dur_ns"], ops["colour"], ops["name"]))
    return (
        pd.concat([p for p in parts if len(p)], ignore_index=True)
        if any(len(p) for p in parts)
        else pd.DataFrame(columns=COLUMNS)
    )


def _lane(tid: Any, start: Any, dur: Any, colour: Any, name: Any) -> pd.DataFrame:
    columns = {"start_ns": np.asarray(start), "dur_ns": np.asarray(dur), "colour": colour, "name": list(name)}
    return pd.DataFrame({"lane": [f"host thread {t}" for t in tid], **columns})


def _wait_name(wait: dict[str, Any]) -> str:
    return f"waits in {wait['name']} ({wait['kind']}), step {wait['step']}<br>{site(wait)}"


def _streams(events: pd.DataFrame) -> pd.DataFrame:
    boxes = lanes.device_boxes(events)
    several = boxes["device"].nunique() > 1
    lane = [
        f"device {d} stream {s}" if several else f"stream {s}"
        for d, s in zip(boxes["device"], boxes["stream"], strict=True)
    ]
    return boxes.assign(lane=lane)[COLUMNS]


def _drawn(boxes: pd.DataFrame, zero_ns: int) -> go.Figure:
    """One bar trace a colour on a linear axis in ms; widths are durations."""
    figure = go.Figure()
    order = sorted(boxes["lane"].unique(), key=_lane_key)
    at = {lane: i for i, lane in enumerate(order)}
    for colour in [c for c in (*COLOURS, "event wait") if c in set(boxes["colour"])]:
        rows = boxes[boxes["colour"] == colour]
        few = Counter(rows["name"])
        figure.add_bar(
            x=rows["dur_ns"].to_numpy() / 1e6,
            base=(rows["start_ns"].to_numpy() - zero_ns) / 1e6,
            y=rows["lane"].map(at).to_numpy(),
            orientation="h", width=0.7, name=NAMES.get(colour, colour),
            marker=fill(colour) if (len(few) and len(rows) < 200) or colour in HATCHED else {"color": COLOURS[colour], "line": {"width": 0}},
            hovertext=rows["name"].to_list(), customdata=np.round(rows["dur_ns"].to_numpy() / 1e3, 2),
            hovertemplate="%{hovertext}<br>%{customdata} µs, from %{base:.4f} ms<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(range(len(order))), ticktext=order, range=[len(order) - 0.4, -0.6], fixedrange=True
    )
    figure.update_xaxes(title_text="ms since the first step shown began on the host", zeroline=False)
    figure.update_layout(barmode="overlay", margin={"t": TOP + 16, "b": 96})
    return figure


def _lane_key(lane: str) -> tuple[int, str]:
    kinds = ("host phases", "host thread", "device phases")
    return next((i for i, k in enumerate(kinds) if lane.startswith(k)), len(kinds)), lane


def _step_lines(figure: go.Figure, trace: Any, lo: int, hi: int) -> None:
    """A dotted line where each step begins on its clock: the device's, or the host's without one."""
    column = "host_start_ns" if trace.is_cpu_only else "device_start_ns"
    rows = trace.steps()
    rows = rows[rows[column].notna() & (rows[column] >= lo) & (rows[column] <= hi)] if len(rows) else rows
    for s in records(rows.head(40)):
        x = (s[column] - lo) / 1e6
        figure.add_vline(x=x, line={"color": "#9CA3AF", "width": 1, "dash": "dot"})
        figure.add_annotation(x=x, y=1, yref="paper", yanchor="bottom", xanchor="left", text=f"step {s['step']}", showarrow=False,
                              font={"size": 10, "color": "#6B7280"})  # fmt: skip
