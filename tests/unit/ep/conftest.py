"""Ranks as threads of one process: collectives are exchanges behind a barrier. Quick, and any number of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor


class ThreadRank:
    """One of ``size`` ranks; a `RankGroup`."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._barrier = rank, len(table), table, barrier

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank gave."""
        self._table[self.rank] = mine
        self._barrier.wait(20)
        given = list(self._table)
        self._barrier.wait(20)
        return given

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.exchange(tensor.clone())).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.exchange(tensor.clone()))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return torch.stack([t[self.rank] for t in self.exchange(tensor.clone())]).sum(0)

    def all_to_all(self, tensor: Tensor, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
        cut = send or [tensor.shape[0] // self.size] * self.size
        parts = [given[self.rank] for given in self.exchange(tensor.clone().split(cut))]
        if receive is not None:
            assert [len(p) for p in parts] == receive
        return torch.cat(parts)


@pytest.fixture(scope="session")
def on_threads() -> Callable[..., list[Any]]:
    """``on_threads(4, fn)``: [fn(rank) for the 4 ranks], each in a thread of its own; an error in one ends all."""

    def run(size: int, fn: Callable[[ThreadRank], Any]) -> list[Any]:
        table: list[Any] = [None] * size
        barrier = threading.Barrier(size)

        def one(rank: int) -> Any:
            try:
                with torch.inference_mode():
                    return fn(ThreadRank(rank, table, barrier))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(one, r) for r in range(size)]
        errors = [f.exception() for f in futures if f.exception() is not None]
        own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (own or errors)[0]
        return [f.result() for f in futures]

    return run
