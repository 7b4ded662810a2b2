"""How many drafts of each request are verified, from what is likely to survive and what a step costs. Pure functions.

R requests, γ drafts each; ``confidence`` [R, γ]: chance that a draft survives given that all before it did; ``lengths`` [R]:
drafts to verify, 0..γ, without the anchor; a ``budget`` K: drafts to verify of all requests together. Formulas: arXiv
2607.05147: survival a_{r,j} = Π_{i≤j} c_{r,i}, expected tokens τ = Σ_r (1 + Σ_{j≤ℓ_r} a_{r,j}), objective Θ = τ / T(R, R + K).

A rule keeps the output's distribution only where whether a draft is verified does not depend on its own value, nor on what
was drafted after it. `early_stop` and `Scheduler` do that. `best_budget` of the very confidences that are then split does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import Costs

MIN_SURVIVAL = 1e-6
"""Drafts less likely than that are no candidates of a split, as in SGLang."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one round verifies."""

    lengths: np.ndarray
    """[R] int64, 0..γ."""
    budget: int | None
    """K that the lengths were split from; None where nothing was known and whole blocks are verified."""

    @property
    def verify_lens(self) -> np.ndarray:
        """[R] rows of the verify forward, anchor included: 1..γ+1."""
        return self.lengths + 1

    @property
    def num_tokens(self) -> int:
        """B: rows of the verify forward of all requests."""
        return int(self.verify_lens.sum())


def survival(confidence: np.ndarray) -> np.ndarray:
    """[R, γ]: a_{r,j}, never rising along a block. Raises `LabError` for anything that is no probability."""
    c = np.asarray(confidence)
    if c.ndim != 2:
        raise LabError(f"confidence has the shape {c.shape}; it is [requests, drafts].")
    bad = ~((c >= 0) & (c <= 1))
    if bad.any():
        r, j = np.argwhere(bad)[0]
        raise LabError(
            f"confidence of request {r} at position {j + 1} is {shown(float(c[r, j]))}; a probability is within 0 to 1."
        )
    return np.cumprod(c, axis=1)


def expected_tokens(survivals: np.ndarray, lengths: np.ndarray) -> float:
    """τ: tokens that a round is expected to commit with ``lengths`` [R] of ``survivals`` [R, γ], bonuses included."""
    verified = np.arange(survivals.shape[1]) < np.asarray(lengths)[:, None]
    return float(len(survivals) + survivals[verified].sum())


def ranked(survivals: np.ndarray, *, least: float = 0.0) -> np.ndarray:
    """[n] candidates as flat indices r·γ + j, in the order in which a budget admits them.

    The likeliest first; among equals by position, then by request, which no drafted value can change, and so that a prefix
    stays a prefix where a confidence is 1. Candidates are those above 0, and from ``least`` on.
    """
    num, gamma = survivals.shape
    request, position = np.divmod(np.arange(num * gamma), gamma) if gamma else (np.zeros(0), np.zeros(0))
    flat = survivals.reshape(-1)
    order = np.lexsort((request, position, -flat))
    return order[(flat[order] > 0) & (flat[order] >= least)]


def token_curve(survivals: np.ndarray, *, least: float = 0.0) -> np.ndarray:
    """[n + 1] τ(K) of the best split of each budget K = 0..n."""
    gains = survivals.reshape(-1)[ranked(survivals, least=least)].astype(np.float64)
    return len(survivals) + np.concatenate([[0.0], np.cumsum(gains)])


def objective(survivals: np.ndarray, costs: Costs, *, least: float = 0.0) -> np.ndarray:
    """[n + 1] Θ(K) in tokens a second, for K = 0..n."""
    tokens = token_curve(survivals, least=least)
    num = len(survivals)
    return tokens / costs.seconds_at(num, num + np.arange(len(tokens)))


def best_budget(survivals: np.ndarray, costs: Costs, *, least: float = MIN_SURVIVAL) -> int:
    """K at the global maximum of Θ; the smallest of equals. It crosses the flat parts of a stair, and sees every confidence:
    of confidences of the blocks at hand it biases the output (appendix A), of older ones it does not."""
    return int(objective(survivals, costs, least=least).argmax())


def split(survivals: np.ndarray, budget: int | None, *, least: float = MIN_SURVIVAL) -> Schedule:
    """The ``budget`` likeliest drafts in the order of `ranked`; None verifies whole blocks."""
    num, gamma = survivals.shape
    if budget is None:
        return Schedule(lengths=np.full(num, gamma, dtype=np.int64), budget=None)
    if budget < 0:
        raise LabError(f"budget={budget} is below 0; it counts drafts to verify.")
    admitted = ranked(survivals, least=least)[:budget]
    return Schedule(lengths=np.bincount(admitted // max(gamma, 1), minlength=num).astype(np.int64), budget=int(budget))


def early_stop(survivals: np.ndarray, costs: Costs) -> Schedule:
    """Algorithm 1: admits drafts in the order of `ranked` and stops at the first that does not raise Θ.

    What was admitted depends on nothing drafted later, so confidences of the blocks at hand may be used. On a stair it stops
    at the first step.
    """
    rises = np.diff(objective(survivals, costs)) > 0
    budget = len(rises) if rises.all() else int(rises.argmin())
    return split(survivals, budget, least=0.0)
