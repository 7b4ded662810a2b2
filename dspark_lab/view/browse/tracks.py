"""Rows of a trace: its steps, phases, ops and calls of each thread, graph replays, streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import comm_labels
from dspark_lab.trace import Trace
from dspark_lab.trace.events import in_categories
from dspark_lab.trace.waits import wait_of
from dspark_lab.view import lanes
from dspark_lab.view.browse.detail import Row

COLOUR_NAMES = (
    "compute",
    "communication",
    "copy",
    "host",
    "wait",
    "event wait",
    "draft",
    "verify",
    "accept",
    "op",
    "graph",
    "step",
)
CODE = {name: i for i, name in enumerate(COLOUR_NAMES)}
MAX_THREADS = 6
"""Threads of a rank that get rows: those with the most calls; the label of the last says how many are left out."""


@dataclass(frozen=True, eq=False)
class Track:
    """A row with what it is of: ``group`` is the position of its trace in the scene; ``source`` says which table ``index`` points into
    (``device``, ``calls``, ``events``, ``launches``, ``steps``)."""

    row: Row
    label: str
    kind: str
    group: int
    source: str
    index: np.ndarray


class Names:
    """One table of names for all traces."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def of(self, column: pd.Series) -> np.ndarray:
        """A code for each entry of a column; each different name is looked at once."""
        codes, found = pd.factorize(column)
        own = np.array([self._at.setdefault(str(n), len(self._at)) for n in found], dtype=np.int64)
        return own[codes] if len(own) else np.zeros(0, dtype=np.int64)

    @property
    def table(self) -> np.ndarray:
        return np.array(list(self._at), dtype=object)


def tracks_of(trace: Trace, group: int, zero: int, names: Names) -> list[Track]:
    """The rows of a trace, from the host's steps down to the device's streams; ``zero``: the time that is 0, ns."""
    return [
        *_step_track(trace, group, zero, names),
        *_phases(trace, group, zero, names),
        *_threads(trace, group, zero, names),
        *_graphs(trace, group, zero, names),
        *_streams(trace, group, zero, names),
    ]


def _track(
    *, start: np.ndarray, end: np.ndarray, colour: np.ndarray, name: np.ndarray, index: np.ndarray, label: str, kind: str, group: int, source: str,
    zero: int,
) -> Track:  # fmt: skip
    order = np.lexsort((-end, start))
    row = Row(start[order] - zero, end[order] - zero, colour[order].astype(np.int8), name[order].astype(np.int32))
    return Track(row=row, label=label, kind=kind, group=group, source=source, index=index[order])


def _step_track(trace: Trace, group: int, zero: int, names: Names) -> list[Track]:
    rows = trace.steps()
    if not len(rows):
        return []
    n = len(rows)
    said = pd.Series(
        [
            f"step {s}: {name}" if str(s) not in str(name) else str(name)
            for s, name in zip(rows["step"], rows["name"], strict=True)
        ]
    )
    return [
        _track(
            start=rows["host_start_ns"].to_numpy(), end=rows["host_end_ns"].to_numpy(), colour=np.full(n, CODE["step"]), name=names.of(said),
            index=np.arange(n), label="steps, host", kind="steps", group=group, source="steps", zero=zero,
        )
    ]  # fmt: skip


def _phases(trace: Trace, group: int, zero: int, names: Names) -> list[Track]:
    """Annotated ranges that are no steps; draft, verify and accept in their colours."""
    at = np.flatnonzero(in_categories(trace.events, ("user_annotation",)))
    marks = trace.events.iloc[at]
    starts = np.isin(marks["ts_ns"].to_numpy(), trace.step_windows.start_ns)
    at = at[~(starts & marks["name"].astype(str).isin(set(trace.step_windows.names)).to_numpy())]
    at = at[_outermost(trace.events["ts_ns"].to_numpy()[at], trace.events["dur_ns"].to_numpy()[at])]
    if not len(at):
        return []
    rows = trace.events.iloc[at]
    last = rows["name"].astype(str).str.rsplit("::").str[-1]
    colour = [CODE[n] if n in lanes.PHASES else CODE["op"] for n in last]
    start = rows["ts_ns"].to_numpy()
    return [
        _track(
            start=start, end=start + rows["dur_ns"].to_numpy(), colour=np.array(colour), name=names.of(rows["name"]), index=at, label="phases, host",
            kind="ops", group=group, source="events", zero=zero,
        )
    ]  # fmt: skip


def _threads(trace: Trace, group: int, zero: int, names: Names) -> list[Track]:
    """For each thread a row of its outermost ops and one of its calls into the driver, waits coloured."""
    events, calls = trace.events, trace.linked.calls
    ops = np.flatnonzero(in_categories(events, ("cpu_op",)))
    of_ops, of_calls = events["tid"].to_numpy()[ops], calls["tid"].to_numpy()
    busiest = pd.Series(np.concatenate((of_calls, of_ops))).value_counts()
    have_calls = set(np.unique(of_calls).tolist())
    tids = sorted(busiest.index.tolist(), key=lambda t: (t not in have_calls, -int(busiest[t])))
    waits = trace.waits()
    out: list[Track] = []
    for tid in tids[:MAX_THREADS]:
        left = (
            f" (+{len(tids) - MAX_THREADS} more threads)"
            if len(tids) > MAX_THREADS and tid == tids[MAX_THREADS - 1]
            else ""
        )
        mine = ops[of_ops == tid]
        outer = mine[_outermost(events["ts_ns"].to_numpy()[mine], events["dur_ns"].to_numpy()[mine])]
        if len(outer):
            start = events["ts_ns"].to_numpy()[outer]
            talk = _talks(events["name"].iloc[outer]) if trace.is_cpu_only else np.zeros(len(outer), dtype=bool)
            plain = CODE["compute"] if trace.is_cpu_only else CODE["op"]
            out.append(
                _track(
                    start=start, end=start + events["dur_ns"].to_numpy()[outer], colour=np.where(talk, CODE["communication"], plain),
                    name=names.of(events["name"].iloc[outer]), index=outer, label=f"thread {tid} ops{left}", kind="ops", group=group,
                    source="events", zero=zero,
                )
            )  # fmt: skip
        rows = np.flatnonzero(of_calls == tid)
        if len(rows):
            start = calls["ts_ns"].to_numpy()[rows]
            colour = np.full(len(rows), CODE["host"])
            within = wait_of(waits, tid, start)
            for_event = np.append((waits["kind"] == "event_wait").to_numpy(), False)[within]
            colour[within >= 0] = CODE["wait"]
            colour[for_event] = CODE["event wait"]
            out.append(
                _track(
                    start=start, end=calls["end_ns"].to_numpy()[rows], colour=colour, name=names.of(calls["name"].iloc[rows]), index=rows,
                    label=f"thread {tid} calls{left}", kind="calls", group=group, source="calls", zero=zero,
                )
            )  # fmt: skip
    return out


def _outermost(start: np.ndarray, dur: np.ndarray) -> np.ndarray:
    """Which events, sorted by start and the longer first, do not lie within an earlier one."""
    if not len(start):
        return np.zeros(0, dtype=bool)
    reach = np.maximum.accumulate(start + dur)
    return np.concatenate(([True], (start + dur)[1:] > reach[:-1]))


def _talks(column: pd.Series) -> np.ndarray:
    return column.astype(str).str.contains(lanes.COMMUNICATION).to_numpy(dtype=bool)


def _graphs(trace: Trace, group: int, zero: int, names: Names) -> list[Track]:
    """A row of graph replays: first kernel to last event of each graph launch, coloured by the phase where it is known."""
    rows = trace.launches()
    at = np.flatnonzero((rows["is_graph"] & (rows["device_start_ns"] > 0)).to_numpy())
    if not len(at):
        return []
    rows = rows.iloc[at]
    spans = lanes.phase_spans(trace)
    phase = dict(zip(spans["device_start_ns"].tolist(), spans["phase"].tolist(), strict=True))
    found = [phase.get(s, "graph") for s in rows["device_start_ns"]]
    said = pd.Series([f"graph replay{'' if p == 'graph' else f', {p}'}" for p in found])
    return [
        _track(
            start=rows["device_start_ns"].to_numpy(), end=rows["device_end_ns"].to_numpy(), colour=np.array([CODE[p] for p in found]),
            name=names.of(said), index=at, label="graph replays", kind="graphs", group=group, source="launches", zero=zero,
        )
    ]  # fmt: skip


def _streams(trace: Trace, group: int, zero: int, names: Names) -> list[Track]:
    device = trace.linked.device
    if not len(device):
        return []
    kernel = (device["category"] == "kernel").to_numpy()
    talks = comm_labels(device["name"]) != ""
    colour = np.where(~kernel, CODE["copy"], np.where(talks, CODE["communication"], CODE["compute"]))
    code, start, end = names.of(device["name"]), device["ts_ns"].to_numpy(), device["end_ns"].to_numpy()
    number_of, stream_of = device["device"].to_numpy().astype(np.int64), device["stream"].to_numpy()
    where, ids = pd.factorize(number_of * (1 << 32) + stream_of, sort=True)
    several = len(pd.unique(number_of)) > 1
    out = []
    for i in range(len(ids)):
        rows = np.flatnonzero(where == i)
        number, stream = int(number_of[rows[0]]), int(stream_of[rows[0]])
        label = f"device {number} stream {stream}" if several else f"stream {stream}"
        out.append(
            _track(
                start=start[rows], end=end[rows], colour=colour[rows], name=code[rows], index=rows, label=label, kind="stream", group=group,
                source="device", zero=zero,
            )
        )  # fmt: skip
    return out
