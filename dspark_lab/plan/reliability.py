"""How far a probability can be believed: calibration error, Brier score, AUC and the bins of a reliability diagram. N events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError

NUM_BINS = 15
"""Equally wide ones, over 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Sums over the events in each of [num_bins] equally wide bins of probability."""

    count: np.ndarray
    probability: np.ndarray
    happened: np.ndarray

    @property
    def ece(self) -> float:
        """Σ_b n_b / N · |mean probability − share that happened|; NaN without an event."""
        total = self.count.sum()
        return float(np.abs(self.probability - self.happened).sum() / total) if total else float("nan")


def binned(probability: np.ndarray, happened: np.ndarray, num_bins: int = NUM_BINS) -> Bins:
    """Events by ``probability`` [N] of what ``happened`` [N] (0 or 1); a bin holds its lower edge, the last one 1 too."""
    if not is_int(num_bins) or num_bins < 1:
        raise LabError(f"num_bins={shown(num_bins)} is not a whole number of at least 1.")
    p, y = np.asarray(probability, dtype=np.float64), np.asarray(happened, dtype=np.float64)
    if p.shape != y.shape or p.ndim != 1:
        raise LabError(
            f"probabilities have the shape {p.shape} and what happened {y.shape}; one a event, in one dimension."
        )
    if ((p < 0) | (p > 1) | np.isnan(p)).any():
        raise LabError("a probability is not within 0 to 1; give those after the sigmoid.")
    at = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    count, ps, ys = (np.bincount(at, weights=w, minlength=num_bins) for w in (None, p, y))
    return Bins(count=count.astype(np.int64), probability=ps, happened=ys)


def ece(probability: np.ndarray, happened: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error. Cheap to have: the base rate for everybody has none; see `brier` and `auc` beside it."""
    return binned(probability, happened, num_bins).ece


def brier(probability: np.ndarray, happened: np.ndarray) -> float:
    """Mean squared error of ``probability`` [N] against ``happened`` [N]; NaN without an event."""
    p, y = np.asarray(probability, dtype=np.float64), np.asarray(happened, dtype=np.float64)
    return float(np.mean((p - y) ** 2)) if len(p) else float("nan")


def auc(probability: np.ndarray, happened: np.ndarray) -> float:
    """Chance that an event that happened had a higher probability than one that did not, ties half; NaN where all are alike."""
    p, y = np.asarray(probability, dtype=np.float64), np.asarray(happened).astype(bool)
    positives, negatives = int(y.sum()), int((~y).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, count = np.unique(p, return_inverse=True, return_counts=True)
    mean_rank = count.cumsum() - (count - 1) / 2  # from 1 on, equals share theirs
    return float((mean_rank[inverse][y].sum() - positives * (positives + 1) / 2) / (positives * negatives))
