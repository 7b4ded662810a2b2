"""Waits by polling: a thread that asks the driver over and over whether an event has passed, and sleeps between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dspark_lab.trace.events import named

#: Looks further apart than this are no wait: the thread did something else between.
APART_NS = 2_000_000
#: A run of looks is known for a wait by one that lasted this long; allocators look too, once or twice, and go on.
LASTED_NS = 30_000

_LOOK = r"(?:Event|Stream)Query"
#: Calls that a look makes itself, or that its caller makes around it, and that enqueue nothing.
_ASIDE = r"(?:Get|PeekAt)LastError|IsCapturing|ThreadExchangeStreamCaptureMode|[GS]etDevice$"


@dataclass(frozen=True)
class Runs:
    """Runs of looks, in order of thread and time. ``rows``: their calls, one run behind the other; run i has rows[bounds[i]:bounds[i + 1]]."""

    rows: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def first(self) -> np.ndarray:
        """The first call of each."""
        return self.rows[self.bounds[:-1]]

    @property
    def last(self) -> np.ndarray:
        return self.rows[self.bounds[1:] - 1]

    @property
    def num_looks(self) -> np.ndarray:
        return np.diff(self.bounds)

    def by_first(self) -> Mapping[int, np.ndarray]:
        """The calls of each run, by its first."""
        return {
            int(self.rows[a]): self.rows[a:b] for a, b in zip(self.bounds[:-1], self.bounds[1:], strict=True) if b > a
        }


def poll_runs(calls: pd.DataFrame) -> Runs:
    """Runs of ``calls`` (of `launches.Linked`) that are waits by polling.

    A run: the same query again and again on one thread that launches work (a watchdog's does not), in one step, with no other call
    between and looks at most ``APART_NS`` apart. The trace does not tell what a query answered, so looks behind one call, the same each time, are
    taken for waits only where one of them went on for ``LASTED_NS``; then those that were answered at once are waits too.
    """
    looks = named(calls, _LOOK)
    if not looks.any():
        return Runs(rows=np.empty(0, dtype=np.int64), bounds=np.zeros(1, dtype=np.int64))
    tid, start, end = (calls[c].to_numpy() for c in ("tid", "ts_ns", "end_ns"))
    launching = np.unique(tid[(calls["is_launch"] | calls["is_graph"]).to_numpy()])
    seen = np.flatnonzero(np.isin(tid, launching) & ~named(calls, _ASIDE))
    seen = seen[np.lexsort((start[seen], tid[seen]))]
    name, place, look = calls["name"].cat.codes.to_numpy()[seen], calls["place"].to_numpy()[seen], looks[seen]
    same = np.zeros(len(seen), dtype=bool)
    same[1:] = (
        look[1:]
        & look[:-1]
        & (tid[seen][1:] == tid[seen][:-1])
        & (name[1:] == name[:-1])
        & (place[1:] == place[:-1])
        & (start[seen][1:] - end[seen][:-1] <= APART_NS)
    )
    at = np.flatnonzero(look)
    begins = np.flatnonzero(~same[at])
    bounds = np.append(begins, len(at))
    rows = seen[at]
    behind = _behind(seen, look, tid, name)[at][begins]
    lasted = (end[rows[bounds[1:] - 1]] - start[rows[begins]] >= LASTED_NS) & (np.diff(bounds) > 1)
    key = pd.MultiIndex.from_arrays([tid[rows[begins]], name[at][begins], behind])
    keep = key.isin(key[lasted])
    sizes = np.diff(bounds)
    return Runs(rows=rows[np.repeat(keep, sizes)], bounds=np.concatenate(([0], np.cumsum(sizes[keep]))))


def _behind(seen: np.ndarray, look: np.ndarray, tid: np.ndarray, name: np.ndarray) -> np.ndarray:
    """The name (code) of the last call of the thread that was no look, for each; −1 without one."""
    at = np.maximum.accumulate(np.where(look, -1, np.arange(len(seen))))
    known = (at >= 0) & (tid[seen][np.maximum(at, 0)] == tid[seen])
    return np.where(known, name[np.maximum(at, 0)], -1)


def looks_of(waits: pd.DataFrame, runs: Runs, calls: pd.DataFrame) -> dict[int, np.ndarray]:
    """The looks (rows of ``calls``, whose ``runs`` these are) of each wait by polling, by its row in ``waits``."""
    if not len(runs):
        return {}
    tid, start = (calls[c].to_numpy() for c in ("tid", "ts_ns"))
    row = {(int(tid[c]), int(start[c])): c for c in runs.first.tolist()}
    looks = runs.by_first()
    polled = np.flatnonzero((waits["num_looks"] > 0).to_numpy())
    at = zip(polled.tolist(), waits["tid"].to_numpy()[polled].tolist(), waits["ts_ns"].to_numpy()[polled].tolist(), strict=True)  # fmt: skip
    return {w: looks[row[t, s]] for w, t, s in at}
