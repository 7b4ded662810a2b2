"""The events of a trace as one table: names interned, times in int64 nanoseconds.

The table (``read_events``) has one row an event that has a duration (``ph`` X), sorted by start, the longer first:

| column | type | meaning |
|---|---|---|
| category, name | categorical | ``kernel``, ``cuda_runtime``, …; the name as recorded |
| ts_ns, dur_ns | int64 | start (with ``baseTimeNanoseconds`` added) and duration, nanoseconds |
| pid, tid | int32 or int64 | process and thread; a name in their place becomes a negative number, see ``EventTable.labels`` |
| stream, device, correlation, external_id, bytes, graph_id, graph_node_id, python_id, python_parent_id | int32 or int64 | from ``args``, −1 where none |

int32 where every value of the file fits: most of a million events is numbers.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.trace.columns import DEVICE_CATEGORIES, INT64_MAX, LABEL_BASE, Columns
from dspark_lab.trace.decode import ReadLog
from dspark_lab.trace.reader import CHUNK_BYTES, TraceFile

RUNTIME_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "hip_runtime",
    "hip_driver",
    "privateuse1_runtime",
    "privateuse1_driver",
)


@dataclass
class EventTable:
    """Events of one file, the header beside them and what reading it took."""

    events: pd.DataFrame
    header: dict[str, Any]
    log: ReadLog
    labels: dict[int, str] = field(default_factory=dict)


def read_events(path: str | Path, *, chunk_bytes: int = CHUNK_BYTES, stacks: bool = True) -> EventTable:
    """Read one file into an ``EventTable``, ``chunk_bytes`` of uncompressed text at a time; ``stacks=False`` leaves Python frames out.

    Raises:
        LabError: the file is missing or no trace.
    """
    source = TraceFile(Path(path), chunk_bytes=chunk_bytes)
    columns, exact = Columns(source.log, stacks=stacks), False
    was_on = gc.isenabled()
    gc.disable()  # tens of thousands of short-lived objects without cycles: the collector only walks them
    try:
        for text, offset in source.runs():
            events = source.decode(text, offset, exact=exact)
            if not columns.add(events, text, offset):
                exact, source.log.num_events = True, source.log.num_events - len(events)
                events = source.decode(text, offset, exact=True)
                columns.add(events, text, offset)
    finally:
        if was_on:
            gc.enable()
    base = source.header.get("baseTimeNanoseconds", 0)
    events = columns.frame(base if isinstance(base, int) and abs(base) < INT64_MAX // 2 else 0)
    events = without_impossible(events, source.log)
    labels = {LABEL_BASE - code: text for text, code in columns.label_codes.items()}
    return EventTable(events, source.header, source.log, labels)


def without_impossible(events: pd.DataFrame, log: ReadLog) -> pd.DataFrame:
    """Durations below zero become zero; events longer than the capture can be are left out. Both are counted."""
    dur, ts = events["dur_ns"].to_numpy(), events["ts_ns"].to_numpy()
    negative = dur < 0
    for i in np.flatnonzero(negative):
        log.add("negative duration read as zero", name=str(events["name"].iloc[i]))
    if negative.any():
        dur = np.where(negative, 0, dur)
        events = events.assign(dur_ns=dur)
    if not len(events):
        return events
    traced = dur[(events["category"] == "Trace").to_numpy()]
    limit = int(traced.max()) + 1_000_000_000 if len(traced) else max(60_000_000_000, 10 * int(ts[-1] - ts[0]))
    long = (dur > limit) | (ts > INT64_MAX - dur)
    for i in np.flatnonzero(long):
        device = "device event" if events["category"].iloc[i] in DEVICE_CATEGORIES else "event"
        log.add(f"{device} with an impossible time left out", name=str(events["name"].iloc[i]))
    return events[~long].reset_index(drop=True) if long.any() else events


def in_categories(events: pd.DataFrame, wanted: Sequence[str]) -> np.ndarray:
    """Which rows are of these categories."""
    known = events["category"].cat.categories
    hit = np.append(known.isin(wanted), False)  # the code of a missing category is −1
    return hit[events["category"].cat.codes.to_numpy()]


def named(rows: pd.DataFrame, pattern: str) -> np.ndarray:
    """Which rows have a name that the regular expression is found in; each different name is looked at once."""
    if not len(rows):
        return np.empty(0, dtype=bool)
    search = re.compile(pattern).search
    codes, names = pd.factorize(rows["name"])
    return np.array([bool(search(str(name))) for name in names], dtype=bool)[codes]
