"""Formats beside Kineto's: how another reader joins in, and what it has to give.

A format is three things: a name, ``matches`` (is this file one of mine?) and ``read`` (its events). ``read`` gives a DataFrame, or an
iterable of mappings, an event each:

| key | what | |
|---|---|---|
| category | ``kernel``, ``gpu_memcpy``, ``gpu_memset`` on the device; ``cuda_runtime`` (``hip_runtime``) for calls; ``user_annotation`` for ranges such as steps; ``cpu_op``, ``python_function``, others of your own | needed |
| name | text; what ``Synchronize``, ``Memcpy``, ``Launch``, ``GraphLaunch`` in a call's name mean is told by these words | needed |
| ts_ns, dur_ns | whole nanoseconds on one clock | needed |
| correlation | the same number on a call and on what it put on the device | for leads, steps of device events, what-if |
| pid, tid, stream, device | numbers; a stream is a queue in which events do not overlap | default −1 |
| bytes, graph_id, graph_node_id, external_id, python_id, python_parent_id | numbers | default −1 |

Everything above the table (steps, integrity, diff, what-if, views) then works as for Kineto.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.errors import LabError
from dspark_lab.trace.columns import COLUMNS, INT_COLUMNS
from dspark_lab.trace.decode import ReadLog
from dspark_lab.trace.events import EventTable, without_impossible
from dspark_lab.trace.reader import open_bytes

#: Packages name their formats here: ``[project.entry-points."dspark_lab.trace_formats"]``, a ``TraceFormat`` or what returns one.
ENTRY_POINTS = "dspark_lab.trace_formats"
_HEAD_BYTES = 4096
_NEEDED = ("category", "name", "ts_ns", "dur_ns")


@dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """Another trace format.

    matches: of the first bytes (uncompressed, up to 4 KB) and the path, whether it is this format's; it must be quick and never raise.
    read: of the path, the events. header: of the path, what Kineto has beside the events, such as ``{"distributedInfo": {"rank": 3,
    "world_size": 8}}``. suffixes: names that a folder is searched for.
    """

    name: str
    matches: Callable[[bytes, Path], bool]
    read: Callable[[Path], pd.DataFrame | Iterable[Mapping[str, Any]]]
    header: Callable[[Path], dict[str, Any]] | None = None
    suffixes: tuple[str, ...] = ()


_registered: dict[str, TraceFormat] = {}


def register_trace_format(
    name: str,
    *,
    matches: Callable[[bytes, Path], bool],
    read: Callable[[Path], pd.DataFrame | Iterable[Mapping[str, Any]]],
    header: Callable[[Path], dict[str, Any]] | None = None,
    suffixes: tuple[str, ...] = (),
    replace: bool = False,
) -> TraceFormat:
    """Let `open_trace` read another format; what ``read`` has to give stands at the top of ``dspark_lab.trace.formats``.

    Raises:
        LabError: the name is taken and ``replace`` is not set, or a function is none.
    """
    if not isinstance(name, str) or not name:
        raise LabError(f"name={name!r} is no name; give a short text, such as 'nsys'.")
    if isinstance(suffixes, str) or not all(isinstance(s, str) for s in suffixes):
        raise LabError(f"suffixes={suffixes!r} must be several texts, such as ('.nsys-rep',).")
    if name in _registered and not replace:
        raise LabError(f"there is a trace format {name!r} already; pass replace=True to put another in its place.")
    for what, function in (("matches", matches), ("read", read), ("header", header)):
        if not (callable(function) or (what == "header" and function is None)):
            raise LabError(f"{what}={function!r} is no function; see dspark_lab.trace.formats.")
    _registered[name] = TraceFormat(name=name, matches=matches, read=read, header=header, suffixes=tuple(suffixes))
    return _registered[name]


def unregister_trace_format(name: str) -> None:
    """Forget a format that was registered; nothing where there is none."""
    _registered.pop(name, None)


def formats() -> list[TraceFormat]:
    """The formats that were registered, the latest first, then those of installed packages."""
    return [*reversed(_registered.values()), *(f for f in _installed() if f.name not in _registered)]


@cache
def _installed() -> tuple[TraceFormat, ...]:
    found = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            made = entry.load()
            made = made if isinstance(made, TraceFormat) else made()
            if not isinstance(made, TraceFormat):
                raise TypeError(f"it gives {type(made).__name__}, not a TraceFormat")
            found.append(made)
        except Exception as err:  # a package of somebody's; it must not keep Kineto files from being read
            warnings.warn(f"the trace format {entry.name!r} ({entry.value}) is left out: {err}", stacklevel=2)
    return tuple(found)


def format_of(path: Path) -> TraceFormat | None:
    """The format that takes the file; None: Kineto's reader does.

    Raises:
        LabError: the file is missing or unreadable.
    """
    known = formats()
    if not known:
        return None
    with open_bytes(path) as f:
        head = f.read(_HEAD_BYTES)[:_HEAD_BYTES]
    return next((f for f in known if _takes(f, head, path)), None)


def _takes(fmt: TraceFormat, head: bytes, path: Path) -> bool:
    try:
        return bool(fmt.matches(head, path))
    except Exception as err:  # somebody's; it must not keep other files from being read
        warnings.warn(
            f"the trace format {fmt.name!r} is left out for {path}: {type(err).__name__}: {err}", stacklevel=2
        )
        return False


def read_foreign(path: Path, fmt: TraceFormat) -> EventTable:
    """The events of a file of another format, checked and completed.

    Raises:
        LabError: what the format gives breaks the contract, or it fails; the text names the format.
    """
    try:
        given = fmt.read(path)
        rows = given if isinstance(given, pd.DataFrame) else pd.DataFrame(list(given))
        header = dict(fmt.header(path)) if fmt.header is not None else {}
    except LabError:
        raise
    except Exception as err:
        raise LabError(f"{path} could not be read as {fmt.name}: {type(err).__name__}: {err}") from err
    log = ReadLog(num_events=len(rows), notes=[f"read by the format {fmt.name!r}"])
    if not len(rows.columns):
        rows = pd.DataFrame({c: [] for c in _NEEDED})
    events = _checked(rows, fmt.name)
    events = events.sort_values(["ts_ns", "dur_ns"], ascending=[True, False], kind="stable", ignore_index=True)
    return EventTable(without_impossible(events, log), dict(header), log)


def _checked(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    missing = [c for c in _NEEDED if c not in rows]
    unknown = [str(c) for c in rows if c not in COLUMNS]
    if missing or unknown:
        what = f"lack {', '.join(missing)}" if missing else f"have {', '.join(unknown)}, which are no columns of events"
        raise LabError(
            f"events of the format {name!r} {what}; needed: {', '.join(_NEEDED)}; known: {', '.join(COLUMNS)}."
        )
    columns: dict[str, Any] = {}
    for column in ("category", "name"):
        texts = rows[column].astype(str).to_numpy(dtype=object)
        columns[column] = pd.Categorical(texts, categories=pd.Index(pd.unique(texts), dtype=object))
    for column in INT_COLUMNS:
        columns[column] = (
            _whole(rows[column], column, name) if column in rows else np.full(len(rows), -1, dtype=np.int64)
        )
    return pd.DataFrame(columns, copy=False)


def _whole(values: pd.Series, column: str, name: str) -> np.ndarray:
    if column not in ("ts_ns", "dur_ns"):
        values = values.astype(object).where(values.notna(), -1)
    try:
        numbers = np.array([int(v) if int(v) == v else None for v in values.tolist()], dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise LabError(f"{column} of the format {name!r} is no whole number of 64 bits in every event.") from None
    return numbers
