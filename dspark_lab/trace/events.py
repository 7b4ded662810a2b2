"""The events of a trace as one table: names interned, times in int64 nanoseconds.

The table (``read_events``) has one row an event that has a duration (``ph`` X), sorted by start, the longer first:

| column | type | meaning |
|---|---|---|
| category, name | categorical | ``kernel``, ``cuda_runtime``, …; the name as recorded |
| ts_ns, dur_ns | int64 | start (with ``baseTimeNanoseconds`` added) and duration, nanoseconds |
| pid, tid | int64 | process and thread; a name in their place becomes a negative number, see ``EventTable.labels`` |
| stream, device, correlation, external_id, bytes, graph_id, graph_node_id, python_id, python_parent_id | int64 | from ``args``, −1 where none |
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.trace.decode import ARGS, PlainArgs, ReadLog, event_offset
from dspark_lab.trace.reader import CHUNK_BYTES, TraceFile

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "hip_runtime",
    "hip_driver",
    "privateuse1_runtime",
    "privateuse1_driver",
)
INT_COLUMNS = ("ts_ns", "dur_ns", "pid", "tid", *ARGS)
COLUMNS = ("category", "name", *INT_COLUMNS)
_INT64_MAX = np.iinfo(np.int64).max
#: Below 2**43 µs a double holds three decimals of a microsecond apart, and rounding gives the exact nanosecond.
_EXACT_US = float(1 << 43)
_LABEL_BASE = -1000
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass
class EventTable:
    """Events of one file, the header beside them and what reading it took."""

    events: pd.DataFrame
    header: dict[str, Any]
    log: ReadLog
    labels: dict[int, str] = field(default_factory=dict)


class _Columns:
    """Collects columns run by run; one instance a file."""

    def __init__(self, log: ReadLog) -> None:
        self.log = log
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.label_codes: dict[str, int] = {}
        self.parts: list[dict[str, np.ndarray]] = []
        self._none = PlainArgs()

    def add(self, events: list[Any], text: bytes, offset: int) -> bool:
        """Append a run read from ``text`` at ``offset``. False, and nothing appended, where times need the exact decoder."""
        spans = [e for e in events if e.ph == "X"]
        timed = [e for e in spans if e.dur is not None and e.ts is not None]
        ts, ts_ok = self._times([e.ts for e in timed])
        dur, dur_ok = self._times([e.dur for e in timed])
        if ts is None or dur is None:
            return False
        if len(timed) < len(spans):
            self._left_out(
                "without a duration",
                [i for i, e in enumerate(events) if e.ph == "X" and (e.dur is None or e.ts is None)],
                events,
                text,
                offset,
            )
        if len(spans) < len(events):
            self._count_pairs([e for e in events if e.ph != "X"])
        args = [e.args or self._none for e in timed]
        part = {
            "category": self._codes([e.cat for e in timed], self.categories),
            "name": self._codes([e.name for e in timed], self.names),
        }
        part["ts_ns"], part["dur_ns"] = ts, dur
        part["pid"], part["tid"] = self._ids([e.pid for e in timed]), self._ids([e.tid for e in timed])
        for column in ARGS:
            part[column] = self._ints(list(map(attrgetter(column), args)), column)
        sound = ts_ok & dur_ok
        if not sound.all():
            bad = {id(timed[i]) for i in np.flatnonzero(~sound)}
            self._left_out(
                "with an impossible time", [i for i, e in enumerate(events) if id(e) in bad], events, text, offset
            )
            part = {k: v[sound] for k, v in part.items()}
        self.parts.append(part)
        return True

    def _left_out(self, why: str, rows: list[int], events: list[Any], text: bytes, offset: int) -> None:
        for i in rows[:1000]:
            what = "device event" if events[i].cat in DEVICE_CATEGORIES else "event"
            place = event_offset(text, i, offset) if self.log.counts.get(f"{what} {why} left out", 0) < 5 else -1
            self.log.add(f"{what} {why} left out", offset=place, name=str(events[i].name))
        if len(rows) > 1000:
            self.log.add(f"event {why} left out", count=len(rows) - 1000)

    def _count_pairs(self, rest: list[Any]) -> None:
        for e in rest:
            if e.ph in ("B", "E"):
                self.log.add("begin or end event (ph B, E) left out", name=str(e.name))

    def _times(self, values: list[Any]) -> tuple[np.ndarray | None, np.ndarray]:
        """(int64 ns, which are finite and fit) of microseconds; (None, …) where doubles are too coarse for them."""
        if values and type(values[0]).__name__ == "Decimal":
            return self._decimal_times(values)
        try:
            us = np.array(values, dtype=np.float64)
        except (TypeError, ValueError):
            us = np.array([_float(v) for v in values])
        finite = np.isfinite(us) & (np.abs(us) < _INT64_MAX / 1000)
        us = np.where(finite, us, 0.0)
        whole = np.floor(us)
        part = us - whole
        coarse = np.flatnonzero(np.abs(us) >= _EXACT_US)
        if any(type(values[i]) is float for i in coarse):
            return None, finite
        return whole.astype(np.int64) * 1000 + np.rint(part * 1000).astype(np.int64), finite

    def _decimal_times(self, values: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        ns = [
            round(v * 1000)
            if hasattr(v, "is_finite") and v.is_finite()
            else round(_float(v) * 1000)
            if np.isfinite(_float(v))
            else _INT64_MAX + 1
            for v in values
        ]
        fits = np.array([abs(v) <= _INT64_MAX for v in ns], dtype=bool)
        return np.array([v if ok else 0 for v, ok in zip(ns, fits, strict=True)], dtype=np.int64), fits

    def _codes(self, values: list[Any], table: dict[str, int]) -> np.ndarray:
        try:
            return np.array([table.setdefault(v, len(table)) for v in values], dtype=np.int64)
        except TypeError:
            return np.array([table.setdefault(str(v), len(table)) for v in values], dtype=np.int64)

    def _ids(self, values: list[Any]) -> np.ndarray:
        try:
            return np.array(values, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return self._labelled(values)

    def _labelled(self, values: list[Any]) -> np.ndarray:
        out = np.empty(len(values), dtype=np.int64)
        for i, v in enumerate(values):
            digits = isinstance(v, str) and _INTEGER.fullmatch(v)
            if digits or (isinstance(v, (int, float)) and abs(v) <= _INT64_MAX):
                out[i] = int(v)
            else:
                out[i] = _LABEL_BASE - self.label_codes.setdefault(str(v), len(self.label_codes))
        return out

    def _ints(self, values: list[Any], column: str) -> np.ndarray:
        try:
            return np.array(values, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return np.array([self._int(v, column) for v in values], dtype=np.int64)

    def _int(self, value: Any, column: str) -> int:
        try:
            number = int(value) if value is not None else -1
        except (TypeError, ValueError, OverflowError):
            return -1
        if abs(number) > _INT64_MAX:
            self.log.add(f"{ARGS[column]} beyond 64 bits read as none", name=str(value))
            return -1
        return number

    def frame(self, base_ns: int) -> pd.DataFrame:
        """All runs as one table, sorted by start, the longer first. Empties the runs, column by column."""
        ts, dur = self._take("ts_ns") + base_ns, self._take("dur_ns")
        order = np.lexsort((-dur, ts))
        columns: dict[str, Any] = {
            "category": _categorical(self._take("category")[order], self.categories),
            "name": _categorical(self._take("name")[order], self.names),
            "ts_ns": ts[order],
            "dur_ns": dur[order],
        }
        for column in INT_COLUMNS[2:]:
            columns[column] = self._take(column)[order]
        self.parts.clear()
        return pd.DataFrame(columns)

    def _take(self, column: str) -> np.ndarray:
        taken = [part.pop(column) for part in self.parts]
        return np.concatenate(taken) if taken else np.empty(0, np.int64)


def read_events(path: str | Path, *, chunk_bytes: int = CHUNK_BYTES) -> EventTable:
    """Read one file into an ``EventTable``, ``chunk_bytes`` of uncompressed text at a time.

    Raises:
        LabError: the file is missing or no trace.
    """
    source = TraceFile(Path(path), chunk_bytes=chunk_bytes)
    columns, exact = _Columns(source.log), False
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
    events = columns.frame(base if isinstance(base, int) and abs(base) < _INT64_MAX // 2 else 0)
    events = _without_impossible(events, source.log)
    labels = {_LABEL_BASE - code: text for text, code in columns.label_codes.items()}
    return EventTable(events, source.header, source.log, labels)


def _without_impossible(events: pd.DataFrame, log: ReadLog) -> pd.DataFrame:
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
    long = (dur > limit) | (ts > _INT64_MAX - dur)
    for i in np.flatnonzero(long):
        device = "device event" if events["category"].iloc[i] in DEVICE_CATEGORIES else "event"
        log.add(f"{device} with an impossible time left out", name=str(events["name"].iloc[i]))
    return events[~long].reset_index(drop=True) if long.any() else events


def in_categories(events: pd.DataFrame, wanted: Sequence[str]) -> np.ndarray:
    """Which rows are of these categories."""
    known = events["category"].cat.categories
    hit = np.append(known.isin(wanted), False)  # the code of a missing category is −1
    return hit[events["category"].cat.codes.to_numpy()]


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _categorical(codes: np.ndarray, table: dict[Any, int]) -> Any:
    return pd.Categorical.from_codes(codes, categories=pd.Index(_unique(table), dtype=object))  # pyright: ignore


def _unique(table: dict[Any, int]) -> list[str]:
    """Names in the order of their codes, as text; two that read alike are told apart."""
    seen: dict[str, None] = {}
    for value in table:
        text = value if isinstance(value, str) else str(value)
        while text in seen:
            text += " "
        seen[text] = None
    return list(seen)
