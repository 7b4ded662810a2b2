"""Where the host stood still: synchronises, waits for events, copies that block."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from dspark_lab.trace.events import in_categories, named
from dspark_lab.trace.launches import Linked
from dspark_lab.trace.steps import StepWindows

KINDS = ("sync", "event_wait", "blocking_copy")
COLUMNS = ("step", "kind", "name", "site", "ts_ns", "dur_us", "tid", "age_steps", "num_looks")
#: An asynchronous copy from host memory counts as blocking from this duration on: below, the call's own cost explains it.
BLOCKING_FROM_NS = 50_000

_SYNC = r"(?:Stream|Device|Ctx)Synchronize|StreamQuery"
_EVENT_WAIT = r"EventSynchronize|EventQuery"
_COPY = r"Memcpy"
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_NOT_OWN = re.compile(r"^(?:torch/|<built-in|<frozen|nn\.Module)|/torch/|/lib/python\d|site-packages/(?:torch|triton)/")


def find_waits(events: pd.DataFrame, linked: Linked, steps: StepWindows) -> pd.DataFrame:
    """One row a wait, in order of time.

    Columns: step (−1 outside every step), kind (``sync``, ``event_wait``, ``blocking_copy``), name (the call), site (Python line where
    stacks were recorded, else the enclosing ops, else the call and its ordinal in the step), ts_ns, dur_us, tid, age_steps (NaN),
    num_looks (calls of a wait by polling, which is one wait from the first to the last of them; 0 for a call that blocks).
    """
    calls, polls = linked.calls, linked.polls
    kind, looks, end = np.full(len(calls), -1), np.zeros(len(calls), dtype=np.int64), calls["end_ns"].to_numpy().copy()
    looks[polls.first], end[polls.first] = polls.num_looks, end[polls.last]
    kind[_blocking(linked)] = 2
    kind[named(calls, _SYNC)] = 0
    kind[named(calls, _EVENT_WAIT)] = 1
    kind[named(calls, r"Query") & (looks == 0)] = -1
    rows = np.flatnonzero(kind >= 0)
    of = calls.iloc[rows].assign(end_ns=end[rows])
    table = pd.DataFrame(
        {
            "step": steps.label(of["place"].to_numpy()).astype(np.int64),
            "kind": np.array(KINDS, dtype=object)[kind[rows]],
            "name": of["name"].astype(str).to_numpy(dtype=object),
            "site": np.array(_sites(events, of, steps), dtype=object),
            "ts_ns": of["ts_ns"].to_numpy(),
            "dur_us": (of["end_ns"] - of["ts_ns"]).to_numpy() / 1000,
            "tid": of["tid"].to_numpy(),
            "age_steps": np.full(len(rows), np.nan),
            "num_looks": looks[rows],
        }
    )
    return table[list(COLUMNS)]


def wait_of(waits: pd.DataFrame, tid: int, start_ns: np.ndarray) -> np.ndarray:
    """The wait (row of ``waits``) that each call of a thread is, or is a look of; −1 for the others."""
    mine = np.flatnonzero((waits["tid"] == tid).to_numpy())
    if not len(mine):
        return np.full(len(start_ns), -1)
    of = waits.iloc[mine]
    since, looks = of["ts_ns"].to_numpy(), of["num_looks"].to_numpy()
    until = since + np.where(looks > 1, np.rint(of["dur_us"].to_numpy() * 1000), 0).astype(np.int64)
    at = np.searchsorted(since, start_ns, side="right") - 1
    return np.where((at >= 0) & (start_ns <= until[np.maximum(at, 0)]), mine[np.maximum(at, 0)], -1)


def blocking_copies(linked: Linked) -> np.ndarray:
    """Which rows of ``linked.device`` are copies whose call blocked."""
    blocked = np.zeros(len(linked.calls) + 1, dtype=bool)
    blocked[:-1] = _blocking(linked)
    return blocked[linked.device["call"].to_numpy()] & (linked.device["category"] == "gpu_memcpy").to_numpy()


def _blocking(linked: Linked) -> np.ndarray:
    """Which calls are copies that held the host until the copy was done, by what they did.

    The call must last until the end of its copy on the device. Small asynchronous copies can outlast theirs on an idle device
    without waiting, so an asynchronous one counts only between the device and memory that is not pinned: to the host always
    where the memory is known to be pageable, else from ``BLOCKING_FROM_NS`` on.
    """
    calls, device = linked.calls, linked.device
    if not len(calls):
        return np.zeros(0, dtype=bool)
    copy_call = named(calls, _COPY) & ~calls["is_graph"].to_numpy()
    is_async = named(calls, r"Async")
    at = device["call"].to_numpy()
    copies = (at >= 0) & (device["category"] == "gpu_memcpy").to_numpy()
    at, own = at[copies], device[copies]
    ended = np.zeros(len(calls), dtype=bool)
    held = calls["end_ns"].to_numpy()[at] >= own["end_ns"].to_numpy()
    ended[at[held]] = True
    has_event, loose, to_pageable = (np.zeros(len(calls), dtype=bool) for _ in range(3))
    has_event[at] = True
    loose[at[named(own, r"Pageable|Host")]] = True
    to_pageable[at[named(own, r"-> Pageable")]] = True
    long = calls["dur_ns"].to_numpy() >= BLOCKING_FROM_NS
    return copy_call & np.where(is_async, ended & loose & (to_pageable | long), ended | ~has_event)


def _sites(events: pd.DataFrame, waits: pd.DataFrame, steps: StepWindows) -> list[str]:
    """A name for the place in the program of each wait."""
    frames = _Ranges(_own_frames(events))
    ops = events[in_categories(events, ("cpu_op", "user_annotation"))]
    around = _Ranges(ops[~ops["name"].astype(str).isin(set(steps.names))] if len(ops) else ops)
    sites: list[str] = []
    seen: dict[tuple[int, str], int] = {}
    columns = (waits[c].tolist() for c in ("name", "tid", "ts_ns", "end_ns", "place"))
    for name, tid, start, end, place in zip(*columns, strict=True):
        since = int(steps.start_ns[place]) if place >= 0 else None
        frame = frames.innermost(tid, start, end)
        site = _frame_site(frame) if frame else " > ".join(around.chain(tid, start, end, since))
        key = (place, site or str(name))
        seen[key] = seen.get(key, 0) + 1
        if not site:
            site = f"{name} #{seen[key]}" + ("" if place >= 0 else " outside the steps")
        elif seen[key] > 1:
            site = f"{site} #{seen[key]}"
        sites.append(site)
    return sites


def _own_frames(events: pd.DataFrame) -> pd.DataFrame:
    """Python frames with a file and a line outside torch and the standard library."""
    frames = events[in_categories(events, ("python_function",))]
    if not len(frames):
        return frames
    used = frames["name"].cat.remove_unused_categories()
    own = np.array(
        [bool(_FRAME.match(str(c))) and not _NOT_OWN.search(str(c)) for c in used.cat.categories], dtype=bool
    )
    return frames[own[used.cat.codes.to_numpy()]]


def _frame_site(name: str) -> str:
    found = _FRAME.match(name)
    return f"{found['file']}:{found['line']} {found['function']}" if found else name


class _Ranges:
    """Named ranges by thread, sorted by start, to be asked what encloses a call."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._threads: dict[int, tuple[np.ndarray, np.ndarray, list[str]]] = {}
        for tid in pd.unique(rows["tid"]):
            own = rows[(rows["tid"] == tid).to_numpy()]
            start = own["ts_ns"].to_numpy()
            self._threads[int(tid)] = (start, start + own["dur_ns"].to_numpy(), own["name"].astype(str).tolist())

    def innermost(self, tid: int, start: int, end: int) -> str | None:
        """The name of the shortest range around a call; looks backwards in growing windows."""
        if tid not in self._threads:
            return None
        starts, ends, names = self._threads[tid]
        upper, width = int(np.searchsorted(starts, start, side="right")), 256
        while upper > 0:
            lower = max(0, upper - width)
            hits = np.flatnonzero(ends[lower:upper] >= end)
            if len(hits):
                return names[lower + int(hits[-1])]
            upper, width = lower, width * 4
        return None

    def chain(self, tid: int, start: int, end: int, since: int | None) -> list[str]:
        """Names of the ranges around a call that began at ``since`` or later, the outermost first."""
        if tid not in self._threads:
            return []
        starts, ends, names = self._threads[tid]
        lower = int(np.searchsorted(starts, since)) if since is not None else 0
        upper = int(np.searchsorted(starts, start, side="right"))
        return [names[lower + int(i)] for i in np.flatnonzero(ends[lower:upper] >= end)]
