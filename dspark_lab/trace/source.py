"""Opening: what a caller may give for a trace, and which rank a file is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from dspark_lab.errors import LabError
from dspark_lab.trace.events import EventTable, read_events
from dspark_lab.trace.model import Trace, TraceSet

_NAMES = re.compile(r"\.json(?:\.gz)?$", re.IGNORECASE)
_RANKS = tuple(
    re.compile(rf"(?:^|[^a-z]){word}[-_=]?(\d+)(?!\d)", re.IGNORECASE) for word in ("rank", "tp", "ep", "dp")
)


def open_trace(source: Any, *, step_pattern: str | None = None) -> Trace | TraceSet:
    """Open a Kineto or Chrome trace, a folder of ranks, or the traces of a run.

    Args:
        source: path of a JSON file (plain or gzip, judged by content), of a folder (always gives a ``TraceSet``, by rank), or
            anything with ``trace_paths`` (a ``Run``; one path gives a ``Trace``, several a ``TraceSet``; of several
            captures of one rank the first is opened, and its ``integrity.messages`` name the others). A ``Trace`` or ``TraceSet`` is given back.
        step_pattern: regular expression for the annotations that are steps, where they are not ``ProfilerStep#N`` or an engine's labels.

    Raises:
        LabError: nothing there, no trace, two files of the same rank, or a pattern that matches nothing.
    """
    if isinstance(source, (Trace, TraceSet)):
        return source
    paths = getattr(source, "trace_paths", None)
    if paths is not None:
        given: Any = paths() if callable(paths) else paths
        paths = [Path(p) for p in given]
        if not paths:
            raise LabError(
                f"{getattr(source, 'name', None) or type(source).__name__} has no traces: it was run without the profiler."
            )
        return (
            _open_file(paths[0], step_pattern)
            if len(paths) == 1
            else _open_ranks(paths, step_pattern, where=paths[0].parent, first_of_rank=True)
        )
    if not isinstance(source, (str, os.PathLike)):
        raise LabError(
            f"a trace is opened from a path, a folder or a run, not from {type(source).__name__} ({source!r:.80})."
        )
    path = Path(source).expanduser()
    return _open_folder(path, step_pattern) if path.is_dir() else _open_file(path, step_pattern)


def _open_file(path: Path, step_pattern: str | None) -> Trace:
    table = read_events(path)
    rank, rank_source = rank_of(table, path, index=0)
    return Trace(table, path=path, rank=rank, rank_source=rank_source, step_pattern=step_pattern)


def _open_folder(folder: Path, step_pattern: str | None) -> TraceSet:
    inside = folder / "traces"
    for place in (folder, inside):
        paths = sorted(p for p in place.iterdir() if p.is_file() and _NAMES.search(p.name)) if place.is_dir() else []
        found = [p for p in paths if "trace" in p.name.lower() or not inside.is_dir()]
        if found:
            return _open_ranks(found, step_pattern, where=place)
    seen = sorted(p.name for p in folder.iterdir())[:8]
    raise LabError(
        f"{folder} holds no trace: no file ends in .json or .json.gz; seen: {', '.join(seen) or 'nothing, the folder is empty'}."
    )


def _open_ranks(paths: list[Path], step_pattern: str | None, *, where: Path, first_of_rank: bool = False) -> TraceSet:
    traces: dict[int, Trace] = {}
    others: dict[int, list[str]] = {}
    skipped: list[str] = []
    index = 0
    for path in paths:
        try:
            table = read_events(path)
        except LabError as err:
            if not path.exists() or len(paths) == 1:
                raise
            skipped.append(str(err))
            continue
        rank, rank_source = rank_of(table, path, index=index)
        index += 1
        if rank in traces and first_of_rank:
            others.setdefault(rank, []).append(path.name)
            continue
        if rank in traces:
            raise LabError(
                f"two files are rank {rank}: {traces[rank].path} and {path} ({rank_source}). A folder is read as the ranks of one job; open one file, or keep one job a folder."
            )
        traces[rank] = Trace(table, path=path, rank=rank, rank_source=rank_source, step_pattern=step_pattern)
    if not traces:
        raise LabError(f"{where} holds no trace; files seen: {', '.join(p.name for p in paths[:8])}. {skipped[0]}")
    said = [f"left out: {s}" for s in skipped]
    for rank, names in others.items():
        note = f"the run holds {len(names) + 1} captures of rank {rank}, of several processes: this is {traces[rank].path.name}, the first; not opened: {', '.join(names)}"
        traces[rank].note(note)
        said.append(note)
    return TraceSet(traces, path=where, messages=tuple(said))


def rank_of(table: EventTable, path: Path, *, index: int) -> tuple[int, str]:
    """(rank, where it was read): ``distributedInfo``, else the ``file name`` (rank, then tp, ep, dp), else the ``order of files``."""
    told = table.header.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    if isinstance(rank, int) and rank >= 0:
        return rank, "distributedInfo"
    for pattern in _RANKS:
        found = pattern.search(path.name)
        if found:
            return int(found[1]), "file name"
    return index, "order of files"
