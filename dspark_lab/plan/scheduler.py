"""`Scheduler`: the schedule as it is deployed. How much is verified comes from old confidences, whose drafts from present ones.

The budget is known before a round is drafted, so the host need not wait for the device; and since it depends on nothing that
is then admitted, a global search over a stair of costs leaves the output's distribution as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import UNPROFILED, Costs, CostWarning, can_trim
from dspark_lab.plan.schedule import Schedule, best_budget, split, survival

LAG = 2
"""Rounds between a confidence and the budget that it enters: what a host two rounds ahead of its device can have read."""


@dataclass(frozen=True)
class _Published:
    rows: dict[Hashable, int]
    survivals: np.ndarray


class Scheduler:
    """Keeps the confidences of the last rounds, and gives each round its budget and its split."""

    def __init__(self, costs: Costs | None, *, block_size: int, max_requests: int, lag: int = LAG) -> None:
        """``costs`` None: nothing was measured. Warns with `CostWarning` where the costs leave nothing to trim, or end below
        ``max_requests`` whole blocks. Raises `LabError` for ``lag`` below 1."""
        for name, value in (("block_size", block_size), ("max_requests", max_requests)):
            if not is_int(value) or value < 1:
                raise LabError(f"{name}={shown(value)} is not a whole number of at least 1.")
        if not is_int(lag) or lag < 1:
            raise LabError(
                f"lag={shown(lag)}: a global search over confidences of the round itself changes what is generated; choose a "
                "lag of at least 1, or plan.schedule.early_stop, which may use them."
            )
        self.costs: Costs = UNPROFILED if costs is None else costs
        self.block_size, self.lag = block_size, lag
        self.trims = can_trim(self.costs, block_size=block_size, max_requests=max_requests)
        """Whether the costs can ever make it verify less than whole blocks."""
        self._published: dict[int, _Published] = {}
        if (text := self._complaint(costs, max_requests)) is not None:
            warnings.warn(text, CostWarning, stacklevel=2)

    def _complaint(self, costs: Costs | None, max_requests: int) -> str | None:
        way = "measure this device with lab.profile_costs(cfg, requests=[...], tokens=[...])."
        full = max_requests * (self.block_size + 1)
        if costs is None:
            return f"no step costs were measured, so every round verifies whole blocks and NOTHING IS TRIMMED; {way}"
        if not self.trims:
            return (
                f"the cost table is flat: up to {full} tokens more drafts cost no more time, so every round verifies whole "
                f"blocks and NOTHING IS TRIMMED; if the device is not like that, {way}"
            )
        if full > costs.max_tokens:
            return (
                f"the cost table ends at {costs.max_tokens} tokens and {max_requests} whole blocks are {full}: beyond its end "
                f"costs look flat and nothing is trimmed there; {way}"
            )
        return None

    def publish(self, round_index: int, requests: Sequence[Hashable], confidence: np.ndarray) -> None:
        """Keeps ``confidence`` [R, γ] of round ``round_index`` for the budget of ``lag`` rounds later.

        ``requests`` names the rows, so that a slot taken over by another request is told apart: (slot, generation), say.
        """
        self._check(requests, confidence)
        rows = {request: i for i, request in enumerate(requests)}
        if len(rows) != len(requests):
            raise LabError(f"requests={shown(list(requests))} names a row twice; each row has a name of its own.")
        self._published[round_index] = _Published(rows, survival(confidence))
        for old in [i for i in self._published if i < round_index - self.lag]:
            del self._published[old]

    def clear(self) -> None:
        """Forgets what was published: rounds are counted anew."""
        self._published.clear()

    def budget(self, round_index: int, requests: Sequence[Hashable]) -> int | None:
        """K of round ``round_index`` over the rows ``requests``; None, which verifies whole blocks, where the round ``lag``
        before published nothing. Rows that were not in it count as certain to survive."""
        old = self._published.get(round_index - self.lag)
        if old is None:
            return None
        survivals = np.ones((len(requests), self.block_size))
        for i, request in enumerate(requests):
            if (row := old.rows.get(request)) is not None:
                survivals[i] = old.survivals[row]
        return best_budget(survivals, self.costs)

    def schedule(self, round_index: int, requests: Sequence[Hashable], confidence: np.ndarray) -> Schedule:
        """Budget, split by the present ``confidence`` [R, γ], and `publish` for later: a whole round on the host."""
        self._check(requests, confidence)
        chosen = split(survival(confidence), self.budget(round_index, requests))
        self.publish(round_index, requests, confidence)
        return chosen

    def _check(self, requests: Sequence[Hashable], confidence: np.ndarray) -> None:
        if np.shape(confidence) != (len(requests), self.block_size):
            raise LabError(
                f"confidence has the shape {np.shape(confidence)}, and {len(requests)} requests with block_size="
                f"{self.block_size} need {(len(requests), self.block_size)}."
            )
