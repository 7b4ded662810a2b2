"""Lanes for events: tracks on which they nest or stand beside each other, made of what profilers write."""

from __future__ import annotations

import numpy as np


def nested(start: np.ndarray, end: np.ndarray, *, slack: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane, end) of events sorted by start, the longer first, so that on every lane two lie one within the other or apart.

    An event that outlasts the one around it by at most ``slack`` ns is cut to that one's end (with stacks profilers write such by a
    nanosecond); by more, it goes to the next lane. Lane 0 is the track itself.
    """
    lane, cut = np.zeros(len(start), dtype=np.int64), end.copy()
    lanes: list[list[int]] = [[]]  # a lane: the ends of the events open on it, the innermost last
    for i, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        k = next((k for k, ends in enumerate(lanes) if _takes(ends, a, b - slack)), len(lanes))
        if k == len(lanes):
            lanes.append([])
        until = min(b, lanes[k][-1]) if lanes[k] else b
        lanes[k].append(until)
        lane[i], cut[i] = k, until
    return lane, cut


def _takes(ends: list[int], start: int, end: int) -> bool:
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or end <= ends[-1]


def apart(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Lane of each event, sorted by start, so that on no lane two run at once; each takes the first lane that is free."""
    lane = np.zeros(len(start), dtype=np.int64)
    free: list[int] = []  # when each lane is free again
    for i, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        k = next((k for k, until in enumerate(free) if until <= a), len(free))
        free[k : k + 1] = [b]
        lane[i] = k
    return lane
