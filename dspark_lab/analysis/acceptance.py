"""Acceptance of prompts as tables: accept length and by position with intervals over prompts, and text that goes round in a loop.

A prompt is the replicate: its rounds are not independent of each other. A figure over prompts is Σ tokens / Σ rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dspark_lab.analysis.intervals import Interval

NUM_RESAMPLES = 2000
LOOP_LENGTH = 24
"""Fewest tokens in a row that repeat those of a period before, to be called a loop: indentation and short words are none."""
LOOP_SHARE = 0.25
"""Share of a generation in loops, from which on it is told apart."""


def loop_share(tokens: Sequence[int]) -> float:
    """Share of ``tokens`` that only repeat what stood a period before: runs of `LOOP_LENGTH` tokens and of a whole period at least.

    0 without a token. Periods of up to half the text are looked for.
    """
    text = np.asarray(tokens)
    n = len(text)
    repeated = np.zeros(n, dtype=bool)
    for period in range(1, n // 2 + 1):
        same = text[period:] == text[:-period]
        for start, end in _runs(same):
            if end - start >= max(period, LOOP_LENGTH):
                repeated[start + period : end + period] = True
    return float(repeated.mean()) if n else 0.0


def _runs(flags: np.ndarray) -> np.ndarray:
    """[R, 2] starts and ends of the stretches of true ``flags``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return edges.reshape(-1, 2)


def bootstrap_ratio(numerators: np.ndarray, denominators: np.ndarray, *, seed: int = 0) -> Interval:
    """Σ ``numerators`` [N] / Σ ``denominators`` [N] with its 95 % percentile interval over resampled prompts.

    NaN bounds below two prompts.
    """
    n, whole = len(denominators), float(np.sum(denominators))
    mean = float(np.sum(numerators)) / whole if whole else float("nan")
    if n < 2 or not whole:
        return Interval(mean, float("nan"), float("nan"), n)
    at = np.random.default_rng(seed).integers(0, n, (NUM_RESAMPLES, n))
    bottoms = np.asarray(denominators, dtype=float)[at].sum(axis=1)
    ratios = np.asarray(numerators, dtype=float)[at].sum(axis=1)[bottoms > 0] / bottoms[bottoms > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(mean, float(low), float(high), n)


def accept_length(rows: pd.DataFrame) -> Interval:
    """Tokens a round, bonus included, over the prompts in ``rows`` (``num_rounds``, ``num_tokens``)."""
    return bootstrap_ratio(rows["num_tokens"].to_numpy(), rows["num_rounds"].to_numpy())


def by_position(rows: pd.DataFrame) -> list[Interval]:
    """P_k, k = 1..γ: rounds that accepted draft token k over all rounds of the prompts in ``rows`` (``accepted``: lists of γ + 1
    counts, the a-th of rounds that accepted exactly a drafts)."""
    if not len(rows):
        return []
    counts = np.array(rows["accepted"].tolist())
    reached = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    return [bootstrap_ratio(reached[:, k], reached[:, 0]) for k in range(1, counts.shape[1])]
