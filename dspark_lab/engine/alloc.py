"""How the device scalar `num_token_non_padded` of the draft batch comes to be: one transfer, behind one guard.

The line this project grew from: SGLang's drafter built the scalar in every step (sglang #33465), only MoE EP reads it, and
`torch.tensor(n, device="cuda")` is a pageable 4-byte copy with a stream synchronise behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from dspark_lab.config import Alloc, ParallelConfig, parse_alloc
from dspark_lab.plan.padding import enable_num_token_non_padded

RING = 8
"""Pinned ints in turn: deeper than the steps in flight, since a pinned source is read when the copy runs."""


class ScalarSource:
    """Makes the scalar once a step. One object an engine; it owns the ring and the persistent buffer."""

    def __init__(self, alloc: Alloc | str, parallel: ParallelConfig, device: torch.device) -> None:
        self.how = parse_alloc(alloc) if isinstance(alloc, str) else alloc
        self.device = device
        self.builds = self.how.builds(enable_num_token_non_padded(parallel))
        """Decided once: the predicate is a pure function of the config, so the hot path holds one branch."""
        self.num_built = 0
        self.host_ns: list[int] = []
        """Host time of each `make`, what it waits included."""
        self._transfer: Callable[[int], Tensor | None] = self._prepare()

    def make(self, num_tokens: int) -> Tensor | None:
        """``num_tokens`` as one int32 element on the device, or None where the guard says that nobody needs it."""
        if not self.builds:
            return None
        start = time.perf_counter_ns()
        scalar = self._transfer(num_tokens)
        self.host_ns.append(time.perf_counter_ns() - start)
        self.num_built += 1
        return scalar

    def _prepare(self) -> Callable[[int], Tensor | None]:
        if self.how.transfer == "pinned":
            pin = self.device.type == "cuda"
            self._ring = torch.empty(RING, 1, dtype=torch.int32, pin_memory=pin)
            self._turn = 0
        if self.how.transfer == "persistent":
            self._buffer = torch.zeros(1, dtype=torch.int32, device=self.device)
        return {
            "blocking": self._blocking,
            "non_blocking": self._non_blocking,
            "pinned": self._pinned,
            "persistent": self._persistent,
        }.get(self.how.transfer, _not_made_here)

    def _blocking(self, n: int) -> Tensor:
        return torch.tensor(n, dtype=torch.int32, device=self.device)

    def _non_blocking(self, n: int) -> Tensor:
        return torch.tensor(n, dtype=torch.int32).to(self.device, non_blocking=True)

    def _pinned(self, n: int) -> Tensor:
        self._turn = (self._turn + 1) % RING
        source = self._ring[self._turn]
        source[0] = n
        return source.to(self.device, non_blocking=True, copy=True)

    def _persistent(self, n: int) -> Tensor:
        return self._buffer.fill_(n)


def _not_made_here(num_tokens: int) -> Tensor | None:
    """``graph_slot``: the count is written into the captured graph's own input at replay. ``none``: never built."""
    return None


def make_num_token_non_padded(
    num_tokens: int, *, parallel: ParallelConfig, device: torch.device | str
) -> Tensor | None:
    """The seed's helper (sglang #34759): None where no one reads the scalar, else one int32 element, copied without blocking."""
    return ScalarSource("on_demand", parallel, torch.device(device)).make(num_tokens)
