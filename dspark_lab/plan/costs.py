"""What a decode step costs by its load, T(requests, tokens): a step table, or a sum of piecewise linear parts. Seconds.

Requests R; tokens B = R + drafts verified, anchors counted; steps a second SPS = 1 / T. Look-up as in arXiv 2607.05147 and
its deployment: a step table is read at the largest probe not above B, an additive one linearly between probes, and both keep
their ends' values beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError


class CostWarning(UserWarning):
    """The scheduler cannot do what it is there for: its cost table is flat, missing, or ends below the load."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """T by tokens alone: ``seconds[i]`` from ``tokens[i]`` up to the next probe. A real device steps up in tiers."""

    tokens: tuple[int, ...]
    """Probes, strictly rising."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_probes("tokens", self.tokens)
        check_seconds("seconds", self.seconds)
        _check_lengths("seconds", self.seconds, "tokens", self.tokens)

    def seconds_at(self, num_requests: int, num_tokens: np.ndarray | Sequence[int]) -> np.ndarray:
        """T at each of ``num_tokens``, float64; ``num_requests`` does not enter."""
        at = np.searchsorted(self.tokens, np.asarray(num_tokens), side="right") - 1
        return np.asarray(self.seconds, dtype=np.float64)[at.clip(min=0)]

    @property
    def max_tokens(self) -> int:
        """The last probe: beyond it the table knows nothing."""
        return self.tokens[-1]


@dataclass(frozen=True, kw_only=True)
class AdditiveTable:
    """T = bias + α(requests) + θ(tokens), both piecewise linear."""

    bias_s: float
    requests: tuple[int, ...]
    """Probes of α, strictly rising."""
    alpha_s: tuple[float, ...]
    tokens: tuple[int, ...]
    """Probes of θ, strictly rising."""
    theta_s: tuple[float, ...]

    def __post_init__(self) -> None:
        check_seconds("bias_s", (self.bias_s,))
        for names, probes, parts in (
            (("requests", "alpha_s"), self.requests, self.alpha_s),
            (("tokens", "theta_s"), self.tokens, self.theta_s),
        ):
            check_probes(names[0], probes)
            _check_lengths(names[1], parts, names[0], probes)
            for value in parts:
                if not _is_finite(value):
                    raise LabError(
                        f"{names[1]} holds {shown(value)}, which is no finite time; measure the table again."
                    )
        least = self.bias_s + min(self.alpha_s) + min(self.theta_s)
        if least <= 0:
            raise LabError(
                f"bias_s={self.bias_s} with alpha_s from {min(self.alpha_s)} and theta_s from {min(self.theta_s)} gives a step of "
                f"{least} s; every sum must be above 0."
            )

    def seconds_at(self, num_requests: int, num_tokens: np.ndarray | Sequence[int]) -> np.ndarray:
        """T at ``num_requests`` and each of ``num_tokens``, float64."""
        alpha = np.interp(num_requests, self.requests, self.alpha_s)
        return self.bias_s + alpha + np.interp(np.asarray(num_tokens), self.tokens, self.theta_s)

    @property
    def max_tokens(self) -> int:
        """The last probe of θ: beyond it the table knows nothing."""
        return self.tokens[-1]


Costs = StepTable | AdditiveTable


def can_trim(costs: Costs, *, block_size: int, max_requests: int) -> bool:
    """Whether verifying fewer drafts is ever cheaper: T rises somewhere from R to R·(γ+1) tokens, for some R up to the load."""
    for num_requests in range(1, max_requests + 1):
        tokens = np.arange(num_requests, num_requests * (block_size + 1) + 1)
        if (np.diff(costs.seconds_at(num_requests, tokens)) > 0).any():
            return True
    return False


def check_probes(name: str, values: Sequence[int]) -> None:
    """Raises `LabError` unless ``values`` are whole numbers of at least 1 that strictly rise, one at least."""
    if not values:
        raise LabError(f"{name} is empty; a table has at least one probe.")
    for value in values:
        if not is_int(value) or value < 1:
            raise LabError(f"{name} holds {shown(value)}; probes are whole numbers of at least 1.")
    for a, b in pairwise(values):
        if a >= b:
            raise LabError(f"{name} has {b} behind {a}; probes strictly rise.")


def check_seconds(name: str, values: Sequence[float]) -> None:
    """Raises `LabError` unless every one is a finite time above 0."""
    for value in values:
        if not _is_finite(value) or value <= 0:
            raise LabError(
                f"{name} holds {shown(value)}; a time is a finite number of seconds above 0: measure the table again."
            )


def _check_lengths(name: str, values: Sequence[float], probe_name: str, probes: Sequence[int]) -> None:
    if len(values) != len(probes):
        raise LabError(f"{name} has {len(values)} values and {probe_name} {len(probes)} probes; one a probe.")


def _is_finite(value: object) -> bool:
    return (isinstance(value, float) or is_int(value)) and math.isfinite(value)


UNPROFILED = StepTable(tokens=(1,), seconds=(1.0,))
"""What stands where nothing was measured: flat, so that whole blocks are verified."""
