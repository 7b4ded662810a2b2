"""The events of a trace as slices on tracks, with the flows from launches to what they put on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from dspark_lab.export.lanes import apart, nested
from dspark_lab.trace import Trace
from dspark_lab.trace.events import DEVICE_CATEGORIES, RUNTIME_CATEGORIES, in_categories

#: An event that outlasts the one around it by no more is cut; by more, it gets a lane of its own. Nanoseconds.
SLACK_NS = 1_000
_RECORDS = ("cuda_sync", "cuda_event")


@dataclass
class Track:
    """A thread or stream in the viewer: numbers that no other track has, and what it is called."""

    process: str
    name: str
    pid: int
    tid: int


@dataclass
class Slices:
    """Slices of all ranks, sorted by step and start. Columns of ``rows``: name, category, ts_ns, dur_ns, cut_ns (how much was cut off the
    duration), track, step (−1: of no step), rank, event (row of the rank's table). ``flows``: from_slice, to_slice, rows of ``rows``."""

    rows: pd.DataFrame
    flows: pd.DataFrame
    tracks: list[Track] = field(default_factory=list)


def slices(
    traces: Mapping[int, Trace], windows: Mapping[int, tuple[int, int] | None], offsets: Mapping[int, int]
) -> Slices:
    """All events that a window touches, on tracks; device events belong to the step that launched them.

    Args:
        windows: rank → [first, last) in the rank's own ns, None for everything.
        offsets: rank → how far its clock is ahead, ns, taken off the times.
    """
    tracks: list[Track] = []
    parts, arrows = [], []
    base = 0
    for rank, trace in traces.items():
        own = _of_rank(trace, windows[rank], tracks)
        own["ts_ns"] -= offsets[rank]
        own.index = pd.RangeIndex(base, base + len(own))
        parts.append(own.assign(rank=rank))
        arrows.append(_flows(trace, own))
        base += len(own)
    rows = pd.concat(parts)
    order = np.lexsort((-rows["dur_ns"].to_numpy(), rows["ts_ns"].to_numpy(), rows["step"].to_numpy()))
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows))
    flows = pd.concat(arrows, ignore_index=True)
    flows = flows.assign(from_slice=place[flows["from_slice"].to_numpy()], to_slice=place[flows["to_slice"].to_numpy()])
    return Slices(rows=rows.iloc[order].reset_index(drop=True), flows=flows, tracks=tracks)


def _of_rank(trace: Trace, window: tuple[int, int] | None, tracks: list[Track]) -> pd.DataFrame:
    events = trace.events
    step = _steps(trace)
    end = events["ts_ns"].to_numpy() + events["dur_ns"].to_numpy()
    device = in_categories(events, DEVICE_CATEGORIES)
    end[device] = trace.sound_ends_ns
    wanted = np.ones(len(events), dtype=bool)
    if window is not None:
        wanted = (events["ts_ns"].to_numpy() < window[1]) & (end > window[0])
    lane, cut = np.full(len(events), -1), end.copy()
    for name, process, rows, nests in _groups(trace, wanted, device):
        start = events["ts_ns"].to_numpy()[rows]
        if nests:
            own, cut[rows] = nested(start, end[rows], slack=SLACK_NS)
        else:
            own = apart(start, np.maximum(end[rows], start))
        for k in range(int(own.max()) + 1):
            pid = 1000 * (trace.rank + 1) + (500 if process.startswith("GPU") else 0)
            full = f"rank {trace.rank} {process}"
            tracks.append(Track(full, name + (f" ({k + 1})" if k else ""), pid, 10_000 + len(tracks)))
            lane[rows[own == k]] = len(tracks) - 1
    rows = np.flatnonzero(lane >= 0)
    start = events["ts_ns"].to_numpy()[rows]
    dur = np.maximum(cut[rows] - start, 0)
    return pd.DataFrame(
        {
            "name": events["name"].cat.codes.to_numpy()[rows],
            "category": events["category"].cat.codes.to_numpy()[rows],
            "ts_ns": start,
            "dur_ns": dur,
            "cut_ns": events["dur_ns"].to_numpy()[rows] - dur,
            "track": lane[rows],
            "step": step[rows],
            "event": rows,
        }
    )


def _groups(trace: Trace, wanted: np.ndarray, device: np.ndarray) -> Iterator[tuple[str, str, np.ndarray, bool]]:
    """(track, process, rows in order of start, whether they nest) for each thread and stream."""
    events = trace.events
    marks, records = in_categories(events, ("gpu_user_annotation",)), in_categories(events, _RECORDS)
    host = wanted & ~device & ~marks & ~records & ~in_categories(events, ("Trace",))
    pids, tids, streams, gpus = (events[c].to_numpy() for c in ("pid", "tid", "stream", "device"))
    for pid, tid in _pairs(pids, tids, host):
        rows = np.flatnonzero(host & (pids == pid) & (tids == tid))
        yield f"thread {trace.labels.get(tid, tid)}", f"host {trace.labels.get(pid, pid)}", rows, True
    for what, mine, nests in (
        ("annotations", marks, True),
        ("stream", device, False),
        ("sync and event records", records, False),
    ):
        for gpu, stream in _pairs(gpus, streams, wanted & mine):
            rows = np.flatnonzero(wanted & mine & (gpus == gpu) & (streams == stream))
            yield (
                f"{what} {stream}" if what == "stream" else f"stream {stream} {what}",
                f"GPU {max(gpu, 0)}",
                rows,
                nests,
            )


def _pairs(a: np.ndarray, b: np.ndarray, mine: np.ndarray) -> list[tuple[int, int]]:
    both = pd.DataFrame({"a": a[mine], "b": b[mine]}).drop_duplicates().sort_values(["a", "b"])
    return [(int(x), int(y)) for x, y in both.itertuples(index=False)]


def _steps(trace: Trace) -> np.ndarray:
    """Number of the step of each event: of the launch for device events, else of the start; −1 outside."""
    events, windows = trace.events, trace.step_windows
    place = windows.of(events["ts_ns"].to_numpy())
    place[in_categories(events, DEVICE_CATEGORIES)] = trace.linked.device["place"].to_numpy()
    return windows.label(place).astype(np.int64)


def _flows(trace: Trace, own: pd.DataFrame) -> pd.DataFrame:
    """Arrows from each launch call to the first event it put on each stream."""
    at = np.full(len(trace.events), -1)
    at[own["event"].to_numpy()] = own.index.to_numpy()
    device_rows = np.flatnonzero(in_categories(trace.events, DEVICE_CATEGORIES))
    call_rows = np.flatnonzero(in_categories(trace.events, RUNTIME_CATEGORIES))
    device = trace.linked.device[["call", "stream", "ts_ns"]].assign(row=at[device_rows])
    device = device[(device["call"] >= 0).to_numpy() & (device["row"] >= 0).to_numpy()]
    first = device.sort_values("ts_ns", kind="stable").drop_duplicates(["call", "stream"])
    source = at[call_rows[first["call"].to_numpy()]]
    table = pd.DataFrame({"from_slice": source, "to_slice": first["row"].to_numpy()})
    begins, arrives = (own["ts_ns"].reindex(table[c]).to_numpy() for c in ("from_slice", "to_slice"))
    lasting = (own["dur_ns"].reindex(table["from_slice"]).to_numpy() > 0) & (
        own["dur_ns"].reindex(table["to_slice"]).to_numpy() > 0
    )
    return table[(source >= 0) & (begins <= arrives) & lasting].reset_index(
        drop=True
    )  # a slice without length holds no flow
