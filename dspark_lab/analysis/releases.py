"""When each event of a device may start in a replay: after what, how long after it, and how far into the call that launches it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dspark_lab.analysis.device_line import DeviceLine

_START_NS = 5_000


class Releases:
    """Rules of each event of a line.

    Attributes: after (the event it follows, −1 none), gap_ns (after the end of that), share and extra_ns: it is released ``share`` of its call's time after
    the call began, and ``extra_ns`` more.

    Where the device was dry for an event, its start shows its own release, and the gap after the event before it is the usual one. Where it was not, its release is
    not seen: then it is the usual one of its like, and by its own start at the latest. What was recorded after the event before it had ended has no
    overlap with it in its duration, so that a usual overlap is not given to it.
    """

    def __init__(self, line: DeviceLine) -> None:
        n = len(line)
        self.after = _followed(line)
        gap = np.where(self.after >= 0, line.start - line.end[np.maximum(self.after, 0)], 0)
        dry = line.host_bound | ((line.call >= 0) & ~line.queued & (line.host_ns > 0) & ~line.same_launch)
        self.gap_ns = np.where(dry, np.minimum(gap, np.maximum(line.natural, 0)), gap)
        call_dur = np.maximum(line.call_end - line.call_start, 1)
        inside = np.clip((line.start - line.call_start) / call_dur, 0.0, 1.0)
        beyond = np.maximum(line.start - line.call_end, 0)
        share, extra = _usual(line, dry, inside, beyond) if n else (inside, beyond)
        self.share = np.where(dry, inside, np.minimum(share, inside))
        self.extra_ns = np.where(dry, beyond, np.minimum(extra, beyond)).astype(np.int64)


def _followed(line: DeviceLine) -> np.ndarray:
    """The event each follows: the one before on a single stream, else the latest that had ended when it began."""
    n = len(line)
    if len(np.unique(line.stream)) <= 1:
        return np.arange(n) - 1
    ends = np.argsort(line.end, kind="stable")
    rank = np.searchsorted(line.end[ends], line.start, side="right") - 1
    follows = np.where(rank >= 0, ends[np.maximum(rank, 0)], -1)
    follows = np.where((follows >= 0) & (line.call_start[follows] > line.call_start), -1, follows)
    return np.where(follows == np.arange(n), -1, follows)


def _usual(line: DeviceLine, dry: np.ndarray, inside: np.ndarray, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(share, extra) of each event by the medians of its like that the device was dry for: the same node of graphs of one size, else the same category."""
    n = len(line)
    first = line.call != np.concatenate(([-2], line.call[:-1]))
    node = np.arange(n) - np.maximum.accumulate(np.where(first, np.arange(n), 0))
    size = np.bincount(line.call[line.call >= 0], minlength=1)[np.maximum(line.call, 0)]
    table = pd.DataFrame(
        {
            "size": np.where(line.in_graph, size, 1),
            "node": node,
            "name": line.name,
            "graph": line.in_graph,
            "shape": line.category,
            "inside": inside,
            "beyond": beyond,
        }
    )
    share, extra = np.full(n, np.nan), np.full(n, np.nan)
    for keys in (["size", "node", "name"], ["graph", "shape"]) if dry.any() else ():
        pooled = table[dry].groupby(keys, sort=False)[["inside", "beyond"]].median().reset_index()
        found = table[keys].merge(pooled, on=keys, how="left")
        fill = np.isnan(share) & ((node == 0) | (len(keys) == 3))
        share = np.where(fill, found["inside"].to_numpy(), share)
        extra = np.where(fill, found["beyond"].to_numpy(), extra)
    share = np.where(np.isnan(share), np.where(node == 0, 1.0, 0.0), share)
    return share, np.where(np.isnan(extra), np.where(node == 0, _START_NS, 0), extra)
