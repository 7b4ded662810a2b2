"""`Arrivals`: where on the host results will stand, and the event behind which they do."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_lab.engine.rounds import Rounds

Arrival = tuple[Tensor, torch.cuda.Event | None]
"""A tensor on the host that is filled once the event has passed; without a GPU it is filled already."""


class Arrivals:
    """Results of the last ``depth`` rounds, each in a place of its own: where the round writes it, else where it is copied to."""

    def __init__(self, rounds: Rounds, depth: int) -> None:
        """``depth``: more than the rounds that are launched and not read."""
        self.rounds, self.depth = rounds, depth
        self._on_gpu = rounds.device.type == "cuda"
        self._copies: Tensor | None = None
        if rounds.sent is None:
            like = rounds.results
            self._copies = torch.zeros(depth, *like.shape, dtype=like.dtype, pin_memory=self._on_gpu)
        self._events = [torch.cuda.Event() if self._on_gpu else None for _ in range(depth)]

    def of_round(self, index: int, num_rows: int) -> Arrival:
        """The first ``num_rows`` results of round ``index``, which has just been launched."""
        turn = index % self.depth
        if self._copies is None:
            assert self.rounds.sent is not None
            host = self.rounds.sent[turn, :num_rows]
        else:
            host = self._copies[turn, :num_rows]
            host.copy_(self.rounds.results[:num_rows], non_blocking=True)
        event = self._events[turn]
        if event is not None:
            event.record()
        return host, event

    def of(self, values: Tensor) -> Arrival:
        """A copy of ``values`` in a buffer of its own: rare, off the hot path."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._on_gpu)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event() if self._on_gpu else None
        if event is not None:
            event.record()
        return host, event

    def check(self, index: int, rows: list[list[int]]) -> None:
        """That ``rows`` read are of round ``index``; AssertionError where another round wrote over them."""
        for row in rows if self.rounds.sent is not None else ():
            assert row[-1] == index, f"results of round {row[-1]} stand where those of round {index} belong"
