"""Dispatchers with a fault on rank 1, named in configs as ``faults:killed`` and so on; not a test itself."""

from __future__ import annotations

import os
import signal
import time

import torch

from dspark_lab.ep.dispatch import AllReduceDispatcher, EpContext

AFTER = 60
"""Dispatches of rank 1 before its fault: some steps into the run."""
_num = [0]


class Faulty(AllReduceDispatcher):
    local_table = None

    def __init__(self, context: EpContext) -> None:
        super().__init__(context)
        self.local_table = None

    def dispatch(self, x, topk_ids, topk_weights, count):
        handle = super().dispatch(x, topk_ids, topk_weights, count)
        _num[0] += self.ranks.rank == 1
        if _num[0] > AFTER:
            self.fault()
        return handle

    def fault(self) -> None:
        raise NotImplementedError


class killed(Faulty):
    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class asleep(Faulty):
    def fault(self) -> None:
        time.sleep(3600)


class broken(Faulty):
    def fault(self) -> None:
        raise ValueError("planted in rank 1")


class drifting(Faulty):
    """Rank 1 adds something to the sum that the others do not see: its tokens differ from theirs."""

    def fault(self) -> None:
        pass

    def combine(self, y, handle):
        y = super().combine(y, handle)
        if _num[0] > AFTER and self.ranks.rank == 1:
            y += 10 * torch.randn_like(y)
        return y


class forgetful(Faulty):
    """Rank 1 takes a request for finished: it would prefill another while the others step on."""

    def fault(self) -> None:
        import gc

        from dspark_lab.engine.decode import DecodeEngine

        for engine in gc.get_objects():
            if isinstance(engine, DecodeEngine) and engine.active:
                engine.active[-1].max_new_tokens = 0
