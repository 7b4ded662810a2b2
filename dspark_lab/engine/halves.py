"""`Halves`: how the two halves of a round are launched: as graphs where they are captured, else call by call."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.device import phase
from dspark_lab.engine.replays import RoundGraphs
from dspark_lab.engine.rounds import Rounds
from dspark_lab.plan.padding import bucket_for


class Halves:
    """Draft and verify of one config's rounds. ``graphs`` may be set aside: without them the same lines run call by call."""

    def __init__(self, cfg: LabConfig, rounds: Rounds, tiers: list[int] | None) -> None:
        """``tiers``: row counts of a compact verify forward; None where blocks are whole."""
        self.cfg, self.rounds, self.tiers, self.gamma = cfg, rounds, tiers, cfg.gamma
        self.graphs: RoundGraphs | None = None
        self.host_work_us: list[float] = []
        # The verify batch always uses one persistent buffer, so that only the draft batch's strategy varies.
        self._verify_slot = torch.zeros(1, dtype=torch.int32, device=rounds.device)

    def scalar(self, n: int) -> Tensor | None:
        """``n`` in the persistent buffer on the device; None where nothing reads it."""
        return self._verify_slot.fill_(n) if self.cfg.needs_scalar else None

    def draft(self, bs: int, b: int, *, max_keys: int, num_slots: int) -> None:
        """The first half of a round of ``bs`` requests, padded to ``b``. Without speculation only the host's work is left of it."""
        if not self.gamma:
            self._host_work()
            return
        with phase("dspark::draft"):
            scalar = self.rounds.proposer.scalar.make(bs * self.rounds.query_len)
            self._host_work()
            if self.graphs is not None:
                self.graphs.draft(bs, scalar, num_slots=num_slots)
                return
            if self.cfg.engine.how.transfer == "graph_slot":  # its graphs are set aside, to count expert load
                scalar = self.scalar(bs * self.rounds.query_len)
            self.rounds.draft(b, max_keys=max_keys, num_requests=bs, num_token_non_padded=scalar)

    def verify(self, bs: int, b: int, budget: int | None, *, max_keys: int, num_slots: int) -> tuple[int, int]:
        """The second half; (real, padded) rows of its forward, real ones as far as the host knows. ``budget``: drafts to verify
        in all, None for every one."""
        width = self.gamma + 1
        if self.tiers is None:
            if self.graphs is not None:
                self.graphs.verify(bs, num_slots=num_slots)
            else:
                count = self.scalar(bs * width)
                self.rounds.verify(b, max_keys=max_keys, num_requests=bs, num_token_non_padded=count)
            return bs * width, b * width
        real = bs * width if budget is None else bs + min(budget, bs * self.gamma)
        tier = bucket_for(real, self.tiers, what="num_rows")
        if self.graphs is not None:
            self.graphs.verify_rows(real)
        else:
            self.rounds.verify(
                b, max_keys=max_keys, num_requests=bs, num_token_non_padded=self.scalar(real),
                compact_rows=tier, num_real_rows=real,
            )  # fmt: skip
        return real, tier

    def idle(self) -> None:
        """Both halves of a round with no request: padded rows only, count 0."""
        b, keys = min(self.cfg.engine.buckets), self.gamma + 1
        if self.gamma:
            scalar = self.rounds.proposer.scalar.make(0)
            self.rounds.draft(b, max_keys=keys, num_requests=0, num_token_non_padded=scalar)
        self.rounds.verify(b, max_keys=keys, num_requests=0, num_token_non_padded=self.scalar(0))

    def _host_work(self) -> None:
        """Busy Python after the scalar's place: stands for a scheduler's work before the launch."""
        if self.cfg.engine.host_work_us:
            start = time.perf_counter_ns()
            end = start + int(self.cfg.engine.host_work_us * 1000)
            while time.perf_counter_ns() < end:
                pass
            self.host_work_us.append((time.perf_counter_ns() - start) / 1e3)
