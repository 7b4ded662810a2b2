"""The decode loop on the host: requests join, rounds are launched, results come back some rounds later.

With ``overlap`` the host prepares round n + 1 while the device runs n: results are read ``LAG`` rounds late, through pinned
memory and an event, so no wait is ever on work younger than that. Without, each round is read at once: the simple loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.device import free_bytes, phase
from dspark_lab.engine.prefill import Prefill
from dspark_lab.engine.replays import RoundGraphs
from dspark_lab.engine.request import Request
from dspark_lab.engine.rounds import Rounds
from dspark_lab.errors import LabError
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.plan.memory import plan_memory
from dspark_lab.plan.padding import bucket_for

LAG = 2
"""Rounds between a launch and the reading of its results, with ``overlap``."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round committed, on the host: a list entry a request that took part."""

    index: int
    """Number of the round since the last reset."""
    tokens: list[list[int]]
    accept_lengths: list[int]
    proposal_lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """Results on their way: a prefill's first token, or a round's packed rows."""

    rows: list[Request]
    host: Tensor
    event: torch.cuda.Event | None
    index: int
    """Round after which this may be read."""
    is_round: bool


def check_runnable(cfg: LabConfig) -> None:
    """Raises `LabError` for what a config may say (a recording may have it) and this version does not run live."""
    p = cfg.parallel
    for asked, what in (
        (p.attn_dp > 1, f"attn_dp={p.attn_dp} (attention data parallelism)"),
        (p.moe_dp > 1, f"moe_dp={p.moe_dp}"),
    ):
        if asked:
            raise LabError(
                f"{what} is not run live by this version; it can be looked at in recordings. Set it back to run here."
            )


class DecodeEngine:
    """One config's engine: ``join`` requests, ``step`` rounds, ``drain`` what is in flight."""

    def __init__(
        self,
        cfg: LabConfig,
        target: Target,
        drafter: Drafter,
        device: torch.device,
        *,
        buckets: Sequence[int] | None = None,
    ) -> None:
        """``buckets``: which graphs to capture; by default all that the batch can shrink to."""
        check_runnable(cfg)
        if cfg.engine.use_graph and device.type != "cuda":
            raise LabError(
                f"use_graph=True needs a GPU and the device is {device}; choose use_graph=False, or look at a recording."
            )
        self.cfg, self.target, self.drafter, self.device = cfg, target, drafter, device
        self.gamma = cfg.model.drafter.block_size
        self._check_memory()
        max_rows = bucket_for(cfg.engine.batch_size, cfg.engine.buckets)
        self.rounds = Rounds(cfg, target, drafter, device, max_rows)
        self.lag = LAG if cfg.engine.overlap else 0
        self.active: list[Request] = []
        self.num_steps = 0
        self.host_work_us: list[float] = []
        self._in_flight: deque[_Flight] = deque()
        # The verify batch always uses one persistent buffer, so that only the draft batch's strategy varies.
        self._verify_slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._prefill = Prefill(cfg, self.rounds, self._persistent_scalar)
        self._hosts = _PinnedRing(self.rounds.packed, self.lag + 2)
        self.reset()
        self.graphs = RoundGraphs(self.rounds, cfg, buckets=buckets) if cfg.engine.use_graph else None

    # -- requests ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all requests; caches keep their memory. The mask is compiled in or out here: arms may share the models."""
        self.active, self.num_steps, self.host_work_us = [], 0, []
        self.rounds.proposer.scalar.host_ns.clear()
        self._in_flight.clear()
        self.rounds.state.clear()
        self.rounds.num_rounds.zero_()
        for layer in (*self.target.model.moe_layers, *self.drafter.moe_layers):
            layer.reads_scalar = self.cfg.needs_scalar

    def join(self, request: Request) -> None:
        """Prefills ``request`` into a free slot: its first token comes from the prompt's last logits, in no round."""
        taken = {r.slot for r in self.active}
        free = [s for s in range(self.cfg.engine.batch_size) if s not in taken]
        if not free:
            raise LabError(
                f"all {self.cfg.engine.batch_size} slots are taken; raise batch_size or wait for a request to finish."
            )
        request.slot = free[0]
        n = len(request.prompt)
        with phase("dspark::prefill"):
            first = self._prefill.run(request.prompt, request.slot)
        row = len(self.active)
        self.rounds.state.join(row, anchor=first, seq_len=n, slot=request.slot, limit=n + request.max_new_tokens)
        request.seq_len = n
        self.active.append(request)
        self._send([request], first.reshape(1, 1), is_round=False)
        self._receive()

    def _retire(self) -> None:
        staying = [i for i, r in enumerate(self.active) if not r.finished]
        if len(staying) < len(self.active):
            self.active = [self.active[i] for i in staying]
            self.rounds.state.keep(staying)

    # -- one round ---------------------------------------------------------------------------------------------

    def step(self) -> list[Round]:
        """Launches one round over all active requests; returns the rounds whose results arrived meanwhile (none or more)."""
        if not self.active:
            raise LabError("no request is active; join() one first.")
        bs = len(self.active)
        b, max_keys = bucket_for(bs, self.cfg.engine.buckets), self._max_keys()
        with phase("dspark::draft"):
            scalar = self.rounds.proposer.scalar.make(bs * self.gamma)
            self._host_work()
            if self.graphs is not None:
                self.graphs.draft(bs, scalar)
            else:
                if self.cfg.engine.how.transfer == "graph_slot":  # its graphs are set aside, to count expert load
                    scalar = self._persistent_scalar(bs * self.gamma)
                self.rounds.draft(b, max_keys=max_keys, num_requests=bs, num_token_non_padded=scalar)
        with phase("dspark::verify"):
            if self.graphs is not None:
                self.graphs.verify(bs)
            else:
                count = self._persistent_scalar(bs * (self.gamma + 1))
                self.rounds.verify(b, max_keys=max_keys, num_requests=bs, num_token_non_padded=count)
        with phase("dspark::accept"):
            self._send(self.active, self.rounds.packed[:bs], is_round=True)
            self.num_steps += 1
            return self._receive()

    def drain(self) -> list[Round]:
        """Waits for everything in flight."""
        done = []
        while self._in_flight:
            done += self._take(self._in_flight.popleft())
        self._retire()
        return done

    def idle_step(self) -> None:
        """A round with no request: joins every collective with padded rows only, count 0, and commits nothing."""
        if self.active:
            raise LabError(f"an idle round is for a rank without requests; this one has {len(self.active)}.")
        b, keys = min(self.cfg.engine.buckets), self.gamma + 1
        scalar = self.rounds.proposer.scalar.make(0)
        self.rounds.draft(b, max_keys=keys, num_requests=0, num_token_non_padded=scalar)
        self.rounds.verify(b, max_keys=keys, num_requests=0, num_token_non_padded=self._persistent_scalar(0))

    def close(self) -> None:
        """Releases graphs; must come before the process group ends."""
        if self.graphs is not None:
            self.graphs.destroy()

    # -- results -----------------------------------------------------------------------------------------------

    def _send(self, rows: list[Request], values: Tensor, *, is_round: bool) -> None:
        """Starts the copy of ``values`` to the host, behind everything launched so far."""
        host, event = self._hosts.copy(values, own=not is_round)
        self._in_flight.append(
            _Flight(rows=list(rows), host=host, event=event, index=self.num_steps, is_round=is_round)
        )

    def _receive(self) -> list[Round]:
        """Reads results that are at least ``lag`` rounds old; newer ones stay in flight."""
        done: list[Round] = []
        while self._in_flight and self._in_flight[0].index < self.num_steps - self.lag + (not self.lag):
            done += self._take(self._in_flight.popleft())
        if done:
            self._retire()
        return done

    def _take(self, flight: _Flight) -> list[Round]:
        if flight.event is not None:
            flight.event.synchronize()
        rows = flight.host.tolist()
        if not flight.is_round:
            flight.rows[0].new_tokens.append(rows[0][0])
            return []
        w, tokens, proposals = self.gamma + 1, [], []
        for request, row in zip(flight.rows, rows, strict=True):
            if row[w] == 0:
                continue  # it had finished when the round ran
            new = row[: row[w]]
            request.new_tokens += new
            request.acceptance_lengths.append(len(new))
            request.proposal_lengths.append(row[w + 1])
            request.seq_len += len(new)
            tokens.append(new)
            proposals.append(row[w + 1])
        return [
            Round(
                index=flight.index, tokens=tokens, accept_lengths=[len(t) for t in tokens], proposal_lengths=proposals
            )
        ]

    # -- host side ---------------------------------------------------------------------------------------------

    def _max_keys(self) -> int:
        """An upper bound of what attention reads, known to the host although results are still in flight."""
        unread = sum(f.is_round for f in self._in_flight) + 1
        reach = max(min(r.seq_len + (self.gamma + 1) * unread, r.limit) for r in self.active)
        return min(reach + self.gamma + 1, self.cfg.model.context_len)

    def _host_work(self) -> None:
        """Busy Python after the scalar's place: stands for a scheduler's work before the launch."""
        if self.cfg.engine.host_work_us:
            start = time.perf_counter_ns()
            end = start + int(self.cfg.engine.host_work_us * 1000)
            while time.perf_counter_ns() < end:
                pass
            self.host_work_us.append((time.perf_counter_ns() - start) / 1e3)

    def _persistent_scalar(self, n: int) -> Tensor | None:
        return self._verify_slot.fill_(n) if self.cfg.needs_scalar else None

    def _check_memory(self) -> None:
        plan, free = plan_memory(self.cfg), free_bytes(self.device)
        need = plan.cache_bytes + plan.logits_bytes
        if need > free:
            raise LabError(
                f"batch_size={self.cfg.engine.batch_size} with context_len={self.cfg.model.context_len} needs {need / 2**30:.1f} GiB "
                f"for KV caches and activations and {free / 2**30:.1f} GiB are free on {self.device}; lower either of them."
            )


class _PinnedRing:
    """Host buffers in turn, deeper than the rounds in flight."""

    def __init__(self, like: Tensor, depth: int) -> None:
        self.on_gpu = like.device.type == "cuda"
        self._ring = [torch.empty(like.shape, dtype=like.dtype, pin_memory=self.on_gpu) for _ in range(depth)]
        self._events = [torch.cuda.Event() if self.on_gpu else None for _ in range(depth)]
        self._turn = 0

    def copy(self, values: Tensor, *, own: bool) -> tuple[Tensor, torch.cuda.Event | None]:
        """``values`` on the host once the event has passed; ``own`` gives a buffer of its own (rare, off the hot path)."""
        if own:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.on_gpu)
            event = torch.cuda.Event() if self.on_gpu else None
        else:
            self._turn = (self._turn + 1) % len(self._ring)
            host, event = self._ring[self._turn][: values.shape[0]], self._events[self._turn]
        host.copy_(values, non_blocking=True)
        if event is not None:
            event.record()
        return host, event
