"""Traces for pictures: opened once and kept, one rank of several, and the line that says what a trace is of."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run

KEEP = 12
"""Traces kept in memory; the one unused longest goes first."""
_opened: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_lock = Lock()


def open_cached(what: Run | Path | str, *, whole: bool = False) -> Any:
    """`lab.open_trace`, parsed once for each state of its files. Of a run one rank; ``whole``: all of them."""
    from dspark_lab.trace import open_trace

    what = one_capture(what) if isinstance(what, Run) and not whole else what
    paths = list(what.trace_paths) if isinstance(what, Run) else [Path(what)]
    key = tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) if p.exists() else (str(p), 0, 0) for p in paths)
    with _lock:
        if key in _opened and not any(p.is_dir() for p in paths):
            _opened.move_to_end(key)
            return _opened[key]
    opened = open_trace(what)
    with _lock:
        _opened[key] = opened
        while len(_opened) > KEEP:
            _opened.popitem(last=False)
    return opened


def one_capture(run: Run) -> Run:
    """The run with one file, of the lowest rank: pictures show one rank of one process, and the others take as long to read."""
    first: dict[int, Path] = {}
    for i, path in enumerate(run.trace_paths):
        rank = re.match(r"rank(\d+)[_.]", path.name)
        first.setdefault(int(rank[1]) if rank else 1000 + i, path)
    return run if len(run.trace_paths) < 2 else replace(run, trace_paths=(first[min(first)],))


def one_rank(trace: Any) -> Any:
    """The trace itself, or the lowest rank of a set. Raises `LabError` for what is neither."""
    if hasattr(trace, "events"):
        return trace
    ranks = getattr(trace, "traces", trace)
    if isinstance(ranks, Mapping) and ranks and all(hasattr(t, "events") for t in ranks.values()):
        return ranks[min(ranks)]
    if isinstance(ranks, list | tuple) and ranks and all(hasattr(t, "events") for t in ranks):
        return min(ranks, key=lambda t: t.rank)
    raise LabError(f"{_shown(trace)} is no trace; pass what lab.open_trace(path) or lab.open_trace(run) returns.")


def _shown(what: Any) -> str:
    """A value in a few words, for an error."""
    text = repr(what)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(what).__name__}"


def trace_label(trace: Any, *, device: str = "") -> str:
    """``profiled, rank 0, H200``: a capture is always profiled, which makes host calls slower."""
    where = device or str(getattr(trace, "device_name", "") or ("CPU only" if trace.is_cpu_only else ""))
    rank = getattr(trace, "rank", None)
    return ", ".join(x for x in ("capture, profiled", where, "" if rank is None else f"rank {rank}") if x)
