"""Least squares whose unknowns are at least 0: what keeps noise in measured times from becoming a discount for more work."""

from __future__ import annotations

import numpy as np

TOLERANCE = 1e-10


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x ≥ 0 [n] that minimises ‖a·x − b‖, for ``a`` [m, n] and ``b`` [m]; C. Lawson and R. Hanson's active set, 1974.

    One unknown at a time becomes free, the one whose gradient is steepest; those that would fall below 0 are bound again.
    """
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if slope.max() <= TOLERANCE * max(1.0, float(np.abs(a.T @ b).max())):
            break
        free[int(slope.argmax())] = True
        x = _step(a, b, x, free)
    return x


def _step(a: np.ndarray, b: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The best x over ``free``, which loses those that reach 0 on the way."""
    while True:
        best = np.zeros_like(x)
        best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        below = free & (best < 0)
        if not below.any():
            return best
        share = float((x[below] / (x[below] - best[below])).min())
        x = x + share * (best - x)
        free &= x > TOLERANCE * max(1.0, float(np.abs(x).max()))
        x = np.where(free, x, 0.0)
