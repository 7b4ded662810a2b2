"""Medians and intervals over replicates. The replicate is a process, or a block where there is only one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.runs.record import Run

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; 1.96 beyond.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
         2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over ``n`` replicates; the bounds are NaN below two."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        return self.n >= 2

    @property
    def reach(self) -> float:
        """The largest distance of a bound from zero."""
        return max(abs(self.low), abs(self.high))


def t_interval(values: np.ndarray) -> Interval:
    """Student's t interval of the mean of ``values``."""
    n = len(values)
    mean = float(np.mean(values)) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    t = _T975[n - 2] if n - 2 < len(_T975) else 1.96
    half = t * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def block_medians(run: Run) -> pd.Series:
    """Median step in µs of each (process, repeat), unprofiled, from the third step on, maximum over ranks."""
    return run.step_us().groupby(["process", "repeat"])["step_us"].median()


def step_interval(run: Run) -> Interval:
    """Interval of the block medians in ms, of their logarithms so that it stays positive; a process is one replicate."""
    logs = t_interval(replicates(np.log(block_medians(run) / 1e3)).to_numpy())
    return Interval(float(np.exp(logs.mean)), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.n)


def paired_delta(run: Run, baseline: Run) -> Interval:
    """Relative difference in percent, block by block of the same (process, repeat), over replicates; from log ratios."""
    both = pd.concat([block_medians(run), block_medians(baseline)], axis=1, keys=["a", "b"]).dropna()
    logs = t_interval(replicates(np.log(both["a"] / both["b"])).to_numpy())
    mean, low, high = (100.0 * float(np.expm1(x)) for x in (logs.mean, logs.low, logs.high))
    return Interval(mean, low, high, logs.n)


def replicates(blocks: Any) -> pd.Series:
    """One value a process where there are several (blocks of one process are not independent), else one a block."""
    per_process = blocks.groupby(level="process").mean()
    return per_process if len(per_process) > 1 else blocks
