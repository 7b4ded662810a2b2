"""Opening: what a caller may give for a trace, and which rank a file is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from dspark_lab.errors import LabError
from dspark_lab.trace.cache import default_cache, expanded
from dspark_lab.trace.events import EventTable, read_events
from dspark_lab.trace.formats import format_of, formats, read_foreign
from dspark_lab.trace.many import read_many
from dspark_lab.trace.model import Trace, TraceSet

_NAMES = re.compile(r"\.json(?:\.gz)?$", re.IGNORECASE)
_RANKS = tuple(
    re.compile(rf"(?:^|[^a-z]){word}[-_=]?(\d+)(?!\d)", re.IGNORECASE) for word in ("rank", "tp", "ep", "dp")
)


def open_trace(
    source: Any, *, step_pattern: str | None = None, stacks: bool = True, cache: bool = True
) -> Trace | TraceSet:
    """Open a Kineto or Chrome trace (or one of a registered format), a folder of ranks, or the traces of a run.

    Args:
        source: path of a JSON file (plain or gzip, judged by content), of a folder (always gives a ``TraceSet``, by rank), or
            anything with ``trace_paths`` (a ``Run``; one path gives a ``Trace``, several a ``TraceSet``; of several
            captures of one rank the first is opened, and its ``integrity.messages`` name the others). A ``Trace`` or ``TraceSet`` is given back.
        step_pattern: regular expression for the annotations that are steps, where they are not ``ProfilerStep#N`` or an engine's labels.
        stacks: False leaves Python frames out: less memory, and waits are named by ops and calls.
        cache: keep large files in the user's cache folder, and take them from there; see ``dspark_lab.trace.cache``.

    Raises:
        LabError: nothing there, no trace, two files of the same rank, or a pattern that matches nothing.
    """
    if isinstance(source, (Trace, TraceSet)):
        return source
    read = _Reader(step_pattern, stacks=stacks, cache=cache)
    paths = getattr(source, "trace_paths", None)
    if paths is not None:
        given: Any = paths() if callable(paths) else paths
        paths = [Path(p) for p in given]
        if not paths:
            raise LabError(
                f"{getattr(source, 'name', None) or type(source).__name__} has no traces: it was run without the profiler."
            )
        return (
            _open_file(paths[0], read)
            if len(paths) == 1
            else _open_ranks(paths, read, where=paths[0].parent, first_of_rank=True)
        )
    if not isinstance(source, (str, os.PathLike)):
        raise LabError(
            f"a trace is opened from a path, a folder or a run, not from {type(source).__name__} ({source!r:.80})."
        )
    path = expanded(source, "path")
    return _open_folder(path, read) if path.is_dir() else _open_file(path, read)


class _Reader:
    """How files are read: the caller's wishes in one place."""

    def __init__(self, step_pattern: str | None, *, stacks: bool, cache: bool) -> None:
        self.step_pattern, self.stacks = step_pattern, stacks
        self.cache = default_cache() if cache else None

    def __call__(self, path: Path) -> EventTable:
        foreign = format_of(path)
        if foreign is not None:
            return read_foreign(path, foreign)
        return self.cache.read(path, stacks=self.stacks) if self.cache else read_events(path, stacks=self.stacks)

    def trace(self, table: EventTable, path: Path, rank: int, rank_source: str) -> Trace:
        return Trace(table, path=path, rank=rank, rank_source=rank_source, step_pattern=self.step_pattern)


def _open_file(path: Path, read: _Reader) -> Trace:
    table = read(path)
    return read.trace(table, path, *rank_of(table, path, index=0))


def _is_named(path: Path) -> bool:
    return bool(_NAMES.search(path.name)) or any(path.name.endswith(s) for f in formats() for s in f.suffixes)


def _open_folder(folder: Path, read: _Reader) -> TraceSet:
    inside = folder / "traces"
    for place in (folder, inside):
        paths = sorted(p for p in place.iterdir() if p.is_file() and _is_named(p)) if place.is_dir() else []
        found = [p for p in paths if "trace" in p.name.lower() or not inside.is_dir()]
        if found:
            return _open_ranks(found, read, where=place)
    seen = sorted(p.name for p in folder.iterdir())[:8]
    raise LabError(
        f"{folder} holds no trace: no file ends in .json or .json.gz; seen: {', '.join(seen) or 'nothing, the folder is empty'}."
    )


def _open_ranks(paths: list[Path], read: _Reader, *, where: Path, first_of_rank: bool = False) -> TraceSet:
    traces: dict[int, Trace] = {}
    others: dict[int, list[str]] = {}
    skipped: list[str] = []
    index = 0
    beside = 0 if formats() else None  # a format that was registered here is not known to other processes
    for path, table in zip(
        paths, read_many(paths, read, cached=read.cache is not None, stacks=read.stacks, processes=beside), strict=True
    ):
        if isinstance(table, Exception):
            if not isinstance(table, LabError) or not path.exists() or len(paths) == 1:
                raise table
            skipped.append(str(table))
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
        traces[rank] = read.trace(table, path, rank, rank_source)
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
