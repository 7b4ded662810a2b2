"""Names that TensorBoard and its PyTorch profiler plugin accept: a folder a run, a file a worker and span."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_lab.runs.record import Run

_GZIP = b"\x1f\x8b"
_WORKER = re.compile(r"^(?:.*_)?rank(\d+)_(\d+)\.")
_RANK = re.compile(r"rank[-_]?(\d+)")
_NS = re.compile(r"\.(\d{13,20})\.pt\.trace\.json")
_PID = re.compile(rb'"pid":\s*"?(\d+)')
_RANK_IN_FILE = re.compile(rb'"distributedInfo":\s*\{[^{}]*?"rank":\s*(\d+)')


def run_names(runs: Sequence[Run]) -> list[str]:
    """A folder name a run, by its config: ``tiny-ep2-blocking-bs4``; runs that would share one add the toggles they differ in."""
    names = [_short(run) for run in runs]
    for name in [n for n in dict.fromkeys(names) if names.count(n) > 1]:
        same = [i for i, n in enumerate(names) if n == name]
        for i, extra in zip(same, _differences([runs[i].config.to_dict() for i in same]), strict=True):
            names[i] += extra
    taken: set[str] = set()
    for i, name in enumerate(names):
        n = 1
        while names[i] in taken:
            n += 1
            names[i] = f"{name}-{n}"
        taken.add(names[i])
    return names


def _short(run: Run) -> str:
    p, e = run.config.parallel, run.config.engine
    parts = [run.config.preset, f"ep{p.ep_size}"]
    parts += [f"{axis}{n}" for axis, n in (("tp", p.tp_size), ("dp", p.attn_dp)) if n > 1]
    parts += [e.alloc, f"bs{e.batch_size}", *(["aa"] if run.role == "aa" else [])]
    return _safe("-".join(parts))


def _differences(configs: list[dict[str, Any]]) -> list[str]:
    toggles = [t for t in configs[0] if len({str(c[t]) for c in configs}) > 1][:3]
    return ["".join(_safe(f"-{t}_{c[t]}") for t in toggles) for c in configs]


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def worker_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each capture with its new name, ``rank{r}_{pid}.{ns}.pt.trace.json`` and ``.gz`` where its content is gzip.

    Rank, pid and time come from the old name, else from the head of the capture (time: of the file); two captures of one
    rank become two spans of one worker.
    """
    named: list[tuple[Path, str]] = []
    taken: set[tuple[str, int]] = set()
    for index, path in enumerate(paths):
        magic, head = _head(path)
        worker = _worker(path.name, head, index)
        ns_in_name = _NS.search(path.name)
        ns = int(ns_in_name[1]) if ns_in_name else path.stat().st_mtime_ns
        while (worker, ns) in taken:
            ns += 1
        taken.add((worker, ns))
        named.append((path, f"{worker}.{ns}.pt.trace.json{'.gz' if magic == _GZIP else ''}"))
    return named


def _worker(name: str, head: bytes, index: int) -> str:
    if whole := _WORKER.match(name):
        return f"rank{whole[1]}_{whole[2]}"
    rank = _RANK.search(name)
    rank_in_file = _RANK_IN_FILE.search(head)
    r = int(rank[1]) if rank else int(rank_in_file[1]) if rank_in_file else index
    pid = _PID.search(head)
    return f"rank{r}_{int(pid[1]) if pid else r}"


def _head(path: Path, size: int = 1 << 16) -> tuple[bytes, bytes]:
    """The first two bytes as they lie there, and the first ``size`` bytes of text; empty where that cannot be unpacked."""
    with path.open("rb") as f:
        magic = f.read(2)
        f.seek(0)
        if magic != _GZIP:
            return magic, f.read(size)
        try:
            return magic, gzip.GzipFile(fileobj=f).read(size)
        except (OSError, EOFError, zlib.error):
            return magic, b""
