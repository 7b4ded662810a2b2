"""Columns of events, grown run by run: names interned, times in int64 nanoseconds, other numbers as narrow as they fit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.trace.decode import ARGS, PlainArgs, ReadLog, event_offset

#: Categories of what runs on a device.
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
INT_COLUMNS = ("ts_ns", "dur_ns", "pid", "tid", *ARGS)
COLUMNS = ("category", "name", *INT_COLUMNS)
#: Names in the place of a pid or tid become numbers from here downwards.
LABEL_BASE = -1000
INT64_MAX = np.iinfo(np.int64).max
_INT32 = np.iinfo(np.int32)
#: Below 2**43 µs a double holds three decimals of a microsecond apart, and rounding gives the exact nanosecond.
_EXACT_US = float(1 << 43)
_INTEGER = re.compile(r"-?[0-9]{1,18}")


class _Growing:
    """One column: appended to in place, so that neither pieces nor a second copy stay in memory."""

    def __init__(self, dtype: Any) -> None:
        self._data, self._size = np.empty(1 << 14, dtype), 0

    def extend(self, values: np.ndarray) -> None:
        if (
            self._data.dtype == np.int32
            and len(values)
            and not (_INT32.min <= values.min() and values.max() <= _INT32.max)
        ):
            self._data = self._data.astype(np.int64)
        end = self._size + len(values)
        if end > len(self._data):
            self._data.resize(end + end // 4, refcheck=False)
        self._data[self._size : end] = values
        self._size = end

    def take(self) -> np.ndarray:
        """The column; it is empty afterwards."""
        data, size, self._size = self._data, self._size, 0
        self._data = np.empty(0, data.dtype)
        data.resize(size, refcheck=False)
        return data


class Columns:
    """Collects columns run by run; one instance a file."""

    def __init__(self, log: ReadLog, *, stacks: bool = True) -> None:
        self.log = log
        self.stacks = stacks
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.label_codes: dict[str, int] = {}
        wide = ("ts_ns", "dur_ns")
        self._columns = {c: _Growing(np.int64 if c in wide else np.int32) for c in COLUMNS}
        self._none = PlainArgs()

    def add(self, events: list[Any], text: bytes, offset: int) -> bool:
        """Append a run read from ``text`` at ``offset``. False, and nothing appended, where times need the exact decoder."""
        spans = [e for e in events if e.ph == "X" and (self.stacks or e.cat != "python_function")]
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
            part[column] = self._ints(args, column)
        sound = ts_ok & dur_ok
        if not sound.all():
            bad = {id(timed[i]) for i in np.flatnonzero(~sound)}
            self._left_out(
                "with an impossible time", [i for i, e in enumerate(events) if id(e) in bad], events, text, offset
            )
            part = {k: v[sound] for k, v in part.items()}
        for column, values in part.items():
            self._columns[column].extend(values)
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
        finite = np.isfinite(us) & (np.abs(us) < INT64_MAX / 1000)
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
            else INT64_MAX + 1
            for v in values
        ]
        fits = np.array([abs(v) <= INT64_MAX for v in ns], dtype=bool)
        return np.array([v if ok else 0 for v, ok in zip(ns, fits, strict=True)], dtype=np.int64), fits

    def _codes(self, values: list[Any], table: dict[str, int]) -> np.ndarray:
        try:
            for new in dict.fromkeys(values):
                table.setdefault(new, len(table))
        except TypeError:  # a name that is no text and has no hash
            return self._codes([v if isinstance(v, str) else str(v) for v in values], table)
        return np.fromiter(map(table.__getitem__, values), np.int32, len(values))

    def _ids(self, values: list[Any]) -> np.ndarray:
        try:
            return np.array(values, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return self._labelled(values)

    def _labelled(self, values: list[Any]) -> np.ndarray:
        out = np.empty(len(values), dtype=np.int64)
        for i, v in enumerate(values):
            digits = isinstance(v, str) and _INTEGER.fullmatch(v)
            if digits or (isinstance(v, (int, float)) and abs(v) <= INT64_MAX):
                out[i] = int(v)
            else:
                out[i] = LABEL_BASE - self.label_codes.setdefault(str(v), len(self.label_codes))
        return out

    def _ints(self, args: list[Any], column: str) -> np.ndarray:
        values: Iterable[Any] = map(attrgetter(column), args)
        try:
            return np.fromiter(values, np.int64, len(args))
        except (TypeError, ValueError, OverflowError):
            return np.array([self._int(getattr(a, column), column) for a in args], dtype=np.int64)

    def _int(self, value: Any, column: str) -> int:
        try:
            number = int(value) if value is not None else -1
        except (TypeError, ValueError, OverflowError):
            return -1
        if abs(number) > INT64_MAX:
            self.log.add(f"{ARGS[column]} beyond 64 bits read as none", name=str(value))
            return -1
        return number

    def frame(self, base_ns: int) -> pd.DataFrame:
        """All runs as one table, sorted by start, the longer first. Empties the columns, one by one."""
        ts, dur = self._take("ts_ns"), self._take("dur_ns")
        ts += base_ns
        order = np.lexsort((-dur, ts))
        columns: dict[str, Any] = {
            "category": _categorical(self._take("category")[order], self.categories),
            "name": _categorical(self._take("name")[order], self.names),
            "ts_ns": ts[order],
            "dur_ns": dur[order],
        }
        del ts, dur
        for column in INT_COLUMNS[2:]:
            columns[column] = self._take(column)[order]
        return pd.DataFrame(columns, copy=False)  # a column is a block of its own: no second copy of the table

    def _take(self, column: str) -> np.ndarray:
        return self._columns[column].take()


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
