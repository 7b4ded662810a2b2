"""Spans of time: what several of them cover together, and how much of others."""

from __future__ import annotations

import numpy as np


def union(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merged intervals (start, end) and the length of all before each."""
    start, end = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    fresh = np.concatenate(([True], start[1:] > end[:-1]))
    starts = start[fresh]
    ends = end[np.append(np.flatnonzero(fresh)[1:] - 1, len(end) - 1)]
    before = np.concatenate(([0], np.cumsum(ends - starts)[:-1]))
    return starts, ends, before


def covered(whole: tuple[np.ndarray, np.ndarray, np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How much of each [a, b) the union covers."""
    starts, ends, before = whole

    def until(t: np.ndarray) -> np.ndarray:
        i = np.searchsorted(starts, t, side="right") - 1
        j = np.maximum(i, 0)
        return np.where(i >= 0, before[j] + np.minimum(t, ends[j]) - starts[j], 0)

    return until(b) - until(a)
