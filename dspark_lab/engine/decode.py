"""The decode loop on the host: requests join, rounds are launched, results come back some rounds later.

With ``overlap`` the host prepares round n + 1 while the device runs n: results are read ``LAG`` rounds late, in pinned
memory behind an event, so no wait is ever on work younger than that. Without, each round is read at once: the simple loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.device import device_name, free_bytes, phase
from dspark_lab.engine.agree import Agreement
from dspark_lab.engine.arrivals import Arrival, Arrivals
from dspark_lab.engine.demands import Demands, sampling_of
from dspark_lab.engine.prefill import Prefill
from dspark_lab.engine.relay import BudgetRelay, sts_scales
from dspark_lab.engine.replays import RoundGraphs
from dspark_lab.engine.request import Request
from dspark_lab.engine.rounds import Rounds
from dspark_lab.ep.groups import ParallelGroups
from dspark_lab.errors import LabError
from dspark_lab.models.decoder import Target
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.plan.memory import plan_memory
from dspark_lab.plan.padding import bucket_for, chunk_ranks, slots_of, usable_buckets
from dspark_lab.plan.tiers import tier_for, tiers_of

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
    if p.moe_dp > 1:
        raise LabError(
            f"moe_dp={p.moe_dp} is not run live by this version; it can be looked at in recordings. Set it back to run here."
        )
    apart = p.attn_dp > 1 or (p.ep_size > 1 and p.dispatcher != "all_reduce")
    if apart and p.world_size != p.ep_size:
        what = f"attn_dp={p.attn_dp}" if p.attn_dp > 1 else f"dispatcher={p.dispatcher!r}"
        raise LabError(
            f"{what} wants every expert whole on one rank, and here {p.world_size} ranks have ep_size={p.ep_size}; "
            f"choose ep_size={p.world_size}, or attn_dp=1 and dispatcher='all_reduce'."
        )
    if p.attn_dp > 1 and p.dispatcher == "all_reduce":
        raise LabError(
            f"dispatcher='all_reduce' wants all rows on every rank, and attn_dp={p.attn_dp} gives each its own; "
            "choose dispatcher='all_gather', 'all_to_all' or 'symm_mem', or attn_dp=1."
        )
    usable_buckets(cfg.engine.buckets, p)


class DecodeEngine:
    """One config's engine: ``join`` requests, ``step`` rounds, ``drain`` what is in flight."""

    def __init__(
        self,
        cfg: LabConfig,
        target: Target,
        drafter: AnyDrafter,
        device: torch.device,
        *,
        buckets: Sequence[int] | None = None,
        groups: ParallelGroups | None = None,
        demands: Demands | None = None,
    ) -> None:
        """``buckets``: which graphs to capture; by default all that the batch can shrink to. ``groups``: this rank's; without
        them it decides alone. ``demands`` of the requests that will join, by default what the config says. With several ranks
        this is a collective call."""
        check_runnable(cfg)
        if cfg.engine.use_graph and device.type != "cuda":
            raise LabError(
                f"use_graph=True needs a GPU and the device is {device}; choose use_graph=False, or look at a recording."
            )
        self.cfg, self.target, self.drafter, self.device = cfg, target, drafter, device
        self.gamma = cfg.gamma
        parallel, groups = cfg.parallel, groups or ParallelGroups()
        self.groups = groups
        self.agreement = Agreement(control=groups.control, rows_ranks=parallel.rows_ranks)
        self.slots = slots_of(cfg.engine.batch_size, parallel.attn_dp, groups.replica)
        """Slots of the batch that this rank's replica serves, by their number in the caches."""
        self._check_memory()
        self.buckets = usable_buckets(cfg.engine.buckets, parallel)
        num_slots = len(
            slots_of(cfg.engine.batch_size, parallel.attn_dp, 0)
        )  # of the fullest replica: shapes are alike
        max_rows = bucket_for(num_slots, self.buckets)
        self.lag = LAG if cfg.engine.overlap else 0
        depth = self.lag + 2
        self.rounds = Rounds(
            cfg, target, drafter, device, max_rows, num_slots=num_slots, replica=groups.replica, demands=demands,
            scales=sts_scales(cfg), depth=depth,
        )  # fmt: skip
        self._arrivals = Arrivals(self.rounds, depth)
        self.relay = BudgetRelay(cfg, device_name(device)) if self.rounds.is_scheduled else None
        self.tiers: list[int] | None = None
        """Row counts of a compact verify forward; None where blocks are whole."""
        if cfg.engine.layout == "compact" and self.gamma:
            fitting = [b for b in self.buckets if b <= max_rows]
            self.tiers = tiers_of(fitting, width=self.gamma + 1, chunks=chunk_ranks(parallel))
        self.active: list[Request] = []
        self.num_steps = 0
        self.host_work_us: list[float] = []
        self._in_flight: deque[_Flight] = deque()
        # The verify batch always uses one persistent buffer, so that only the draft batch's strategy varies.
        self._verify_slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._prefill = Prefill(cfg, self.rounds, self._persistent_scalar)
        self.reset()
        if buckets is None:
            buckets = [b for b in self.buckets if b <= max_rows]
        self.graphs = None
        if cfg.engine.use_graph:
            self.graphs = RoundGraphs(self.rounds, cfg, buckets=buckets, tiers=self.tiers)

    # -- requests ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all requests; caches keep their memory. Arms may share the models, so what they differ in there is set here."""
        self.active, self.num_steps, self.host_work_us = [], 0, []
        self.num_real_rows, self.num_padded_rows = 0, 0
        self._unconfirmed: list[list[int]] = []
        self.rounds.proposer.scalar.host_ns.clear()
        self._in_flight.clear()
        self.rounds.state.clear()
        self.rounds.num_rounds.zero_()
        if self.relay is not None:
            self.relay.clear()
        for layer in (*self.target.model.moe_layers, *self.drafter.moe_layers):
            layer.reads_scalar, layer.padding_policy = self.cfg.needs_scalar, self.cfg.engine.padding_policy
            if hasattr(layer.dispatcher, "fixed_sizes"):
                layer.dispatcher.fixed_sizes = self.cfg.engine.use_graph  # pyright: ignore[reportAttributeAccessIssue]

    def join(self, request: Request) -> None:
        """Prefills ``request`` into a free slot: its first token comes from the prompt's last logits, in no round."""
        if self.cfg.parallel.attn_dp > 1:
            raise LabError("with attn_dp above 1 requests join on all ranks together: use admit().")
        if self._free_slot() is None:
            raise LabError(
                f"all {self.cfg.engine.batch_size} slots are taken; raise batch_size or wait for a request to finish."
            )
        once = iter([request])
        self.admit(lambda _: next(once, None))

    def admit(self, next_request: Callable[[int], Request | None]) -> list[Request | None]:
        """Prefills what ``next_request(slot)`` gives for each free slot of the batch, until it gives None or none is free.

        With attention DP a collective call: one request a replica at a time, and replicas without one take part with padded
        rows. Returns the requests that joined here, None for each prefill of others alone.
        """
        joined: list[Request | None] = []
        while True:
            slot = self._free_slot()
            request = None if slot is None else next_request(self.slots[slot])
            num_rows = 0 if request is None else len(request.prompt)
            if self.cfg.parallel.attn_dp > 1:
                everyone = self.agreement.of_replicas([num_rows], f"the prefill before step {self.num_steps}")
                num_rows = max(rows for (rows,) in everyone)
            if not num_rows:
                return joined
            if self.cfg.parallel.attn_dp == 1:
                self._confirm(f"the prefill before step {self.num_steps}", prefill_rows=num_rows)
            t = chunk_ranks(self.cfg.parallel)
            padded = -(-num_rows // t) * t
            with phase("dspark::prefill"):
                if request is None or slot is None:
                    self._prefill.idle(padded)
                else:
                    self._enter(request, slot, padded)
            joined.append(request)
            self._receive()

    def _enter(self, request: Request, slot: int, padded: int) -> None:
        request.slot, n, row = slot, len(request.prompt), len(self.active)
        state, samplers, stop_ids = self.rounds.state, self.rounds.samplers, self.rounds.stop_ids
        request.stop_token_ids = self.rounds.demands.stop_token_ids
        if samplers is not None:
            samplers.join(row, request.sampling or sampling_of(self.cfg), request.number)
        first = self._prefill.run(request.prompt, slot, row, padded=padded)
        state.join(row, anchor=first, seq_len=n, slot=slot, limit=n + request.max_new_tokens)
        if stop_ids is not None:
            limit = state.limits[row : row + 1]
            limit.copy_(torch.where((first[:, None] == stop_ids).any(dim=1), 0, limit))
        request.seq_len = n
        self.active.append(request)
        self._await([request], self._arrivals.of(first.reshape(1, 1)), is_round=False)

    def _free_slot(self) -> int | None:
        taken = {r.slot for r in self.active}
        return next((s for s in range(len(self.slots)) if s not in taken), None)

    def _retire(self) -> None:
        staying = [i for i, r in enumerate(self.active) if not r.finished]
        if len(staying) < len(self.active):
            self.active = [self.active[i] for i in staying]
            order = self.rounds.state.keep(staying)
            if self.rounds.samplers is not None:
                self.rounds.samplers.keep(order)

    # -- one round ---------------------------------------------------------------------------------------------

    def step(self) -> list[Round]:
        """Launches one round over all active requests; returns the rounds whose results arrived meanwhile (none or more).

        With attention DP a collective call: a replica without requests takes part with padded rows.
        """
        early = [] if self.relay is None else self._receive_until(self.num_steps - self.relay.lag)
        bs = len(self.active)
        budget = None if self.relay is None else self.relay.budget(self.num_steps, self.active)
        num_slots = self._agree_on_slots(bs, budget)
        if not num_slots:
            if early:
                return early
            raise LabError("no request is active; join() one first.")
        b, max_keys = bucket_for(num_slots, self.buckets), self._max_keys()
        if self.relay is not None:
            self.rounds.budget.fill_(-1 if budget is None else budget)
        self._draft(bs, b, max_keys=max_keys, num_slots=num_slots)
        with phase("dspark::verify"):
            verified = self._verify(bs, b, budget, max_keys=max_keys, num_slots=num_slots)
        drafted = self.rounds.rows_a_request - self.rounds.width
        self.num_real_rows += bs * drafted + verified[0]
        self.num_padded_rows += b * drafted + verified[1]
        with phase("dspark::accept"):
            if bs:
                self._await(self.active, self._arrivals.of_round(self.num_steps, bs), is_round=True)
            self.num_steps += 1
            return early + self._receive()

    def _verify(self, bs: int, b: int, budget: int | None, *, max_keys: int, num_slots: int) -> tuple[int, int]:
        """The second half of a round; (real, padded) rows of its forward, real ones as far as the host knows."""
        width = self.gamma + 1
        if self.tiers is None:
            if self.graphs is not None:
                self.graphs.verify(bs, num_slots=num_slots)
            else:
                count = self._persistent_scalar(bs * width)
                self.rounds.verify(b, max_keys=max_keys, num_requests=bs, num_token_non_padded=count)
            return bs * width, b * width
        real = bs * width if budget is None else bs + min(budget, bs * self.gamma)
        tier = tier_for(real, self.tiers)
        if self.graphs is not None:
            self.graphs.verify_rows(real)
        else:
            self.rounds.verify(
                b, max_keys=max_keys, num_requests=bs, num_token_non_padded=self._persistent_scalar(real),
                compact_rows=tier, num_real_rows=real,
            )  # fmt: skip
        return real, tier

    def _draft(self, bs: int, b: int, *, max_keys: int, num_slots: int) -> None:
        """The first half of a round. Without speculation nothing but the host's work is left of it."""
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
                scalar = self._persistent_scalar(bs * self.rounds.query_len)
            self.rounds.draft(b, max_keys=max_keys, num_requests=bs, num_token_non_padded=scalar)

    def _agree_on_slots(self, bs: int, budget: int | None) -> int:
        """Requests of the fullest replica, which choose the bucket of all, and the budget of this one, which chooses a tier:
        what no rank may decide alone."""
        what, scheduled = f"step {self.num_steps}", -1 if budget is None else budget
        if self.cfg.parallel.attn_dp > 1:
            return max(n for n, _ in self.agreement.of_replicas([bs, scheduled], what))
        self._confirm(what, prefill_rows=0, budget=scheduled)
        return bs

    def _confirm(self, what: str, *, prefill_rows: int, budget: int = -1) -> None:
        """That all ranks are about to do ``what`` alike, and have read the same results before it."""
        results, self._unconfirmed = self._unconfirmed, []
        graphs = int(self.graphs is not None)
        shape = {"prefill_rows": prefill_rows, "requests": len(self.active), "graphs": graphs, "verify_budget": budget}
        self.agreement.confirm(what, shape, results)

    def drain(self) -> list[Round]:
        """Waits for everything in flight."""
        done = []
        while self._in_flight:
            done += self._take(self._in_flight.popleft())
        self._retire()
        self.agreement.close()
        return done

    def idle_step(self) -> None:
        """A round with no request: joins every collective with padded rows only, count 0, and commits nothing."""
        if self.active:
            raise LabError(f"an idle round is for a rank without requests; this one has {len(self.active)}.")
        b, keys = min(self.cfg.engine.buckets), self.gamma + 1
        if self.gamma:
            scalar = self.rounds.proposer.scalar.make(0)
            self.rounds.draft(b, max_keys=keys, num_requests=0, num_token_non_padded=scalar)
        self.rounds.verify(b, max_keys=keys, num_requests=0, num_token_non_padded=self._persistent_scalar(0))
        self.num_steps += 1

    def any_active(self) -> bool:
        """Whether a request runs on any replica; with attention DP a collective call."""
        if self.cfg.parallel.attn_dp == 1:
            return bool(self.active)
        return any(n for (n,) in self.agreement.of_replicas([len(self.active)], f"the end of step {self.num_steps}"))

    def of_all_replicas(self, mine: list[Any]) -> list[Any]:
        """The lists of all attention replicas, one behind the other; a collective call where there are several."""
        if self.groups.control is None or self.cfg.parallel.attn_dp == 1:
            return mine
        everyone = self.groups.control.objects(mine)
        return [x for part in everyone[:: self.cfg.parallel.rows_ranks] for x in part]

    def close(self) -> None:
        """Releases graphs; must come before the process group ends."""
        if self.graphs is not None:
            self.graphs.destroy()

    # -- results -----------------------------------------------------------------------------------------------

    def _await(self, rows: list[Request], arrival: Arrival, *, is_round: bool) -> None:
        host, event = arrival
        self._in_flight.append(
            _Flight(rows=list(rows), host=host, event=event, index=self.num_steps, is_round=is_round)
        )

    def _receive(self) -> list[Round]:
        """Reads results that are at least ``lag`` rounds old; newer ones stay in flight."""
        return self._receive_until(self.num_steps - self.lag - 1 + (not self.lag))

    def _receive_until(self, index: int) -> list[Round]:
        """Reads results up to round ``index``."""
        done: list[Round] = []
        waiting = bool(self._in_flight) and self._in_flight[0].index <= index
        while self._in_flight and self._in_flight[0].index <= index:
            done += self._take(self._in_flight.popleft())
        if waiting:
            self._retire()
        return done

    def _take(self, flight: _Flight) -> list[Round]:
        if flight.event is not None:
            self._wait_for(flight.event, flight.index)
        rows = flight.host.tolist()
        if self.groups.control is not None:
            self._unconfirmed += rows
        if not flight.is_round:
            flight.rows[0].commit(rows[0][:1])
            return []
        self._arrivals.check(flight.index, rows)
        columns, tokens, proposals = self.rounds.columns, [], []
        if self.relay is not None:
            self.relay.publish(flight.index, flight.rows, columns.confidence_of(rows))
        for request, row in zip(flight.rows, rows, strict=True):
            if columns.lost(row):
                raise _no_room(columns.lost(row), flight.index, self.cfg)
            new = columns.tokens(row)
            if not new:
                continue  # it had finished when the round ran
            request.commit(new)
            request.acceptance_lengths.append(len(new))
            request.proposal_lengths.append(columns.verified(row))
            request.seq_len += len(new)
            if self.rounds.demands.keep_rounds:
                request.rounds.append(columns.detail(row))
            tokens.append(new)
            proposals.append(columns.verified(row))
        return [
            Round(
                index=flight.index, tokens=tokens, accept_lengths=[len(t) for t in tokens], proposal_lengths=proposals
            )
        ]

    # -- host side ---------------------------------------------------------------------------------------------

    def _wait_for(self, event: torch.cuda.Event, index: int) -> None:
        """Until ``event`` has passed. With several ranks by polling: an event behind a collective that a rank never joins has
        no time limit of its own, and collectives in graphs are invisible to NCCL's watchdog."""
        if self.groups.control is None:
            event.synchronize()
        elif not event.query():
            self.groups.control.wait(event.query, f"the collectives of round {index}")

    def _max_keys(self) -> int:
        """An upper bound of what attention reads, known to the host although results are still in flight."""
        if not self.active:
            return self.gamma + 1
        unread = sum(f.is_round for f in self._in_flight) + 1
        reach = max(min(r.seq_len + (self.gamma + 1) * unread, r.limit) for r in self.active)
        return min(reach + self.gamma + 1, self.rounds.context_len)

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
        """Refuses what does not fit on the fullest rank, on all ranks alike."""
        plan, free = plan_memory(self.cfg), free_bytes(self.device)
        if self.groups.control is not None:
            free = min(free for (free,) in self.groups.control.gather([free], "the check of free memory"))
        need = plan.cache_bytes + plan.logits_bytes
        if need > free:
            raise LabError(
                f"batch_size={self.cfg.engine.batch_size} with context_len={self.cfg.model.context_len} needs {need / 2**30:.1f} GiB "
                f"for KV caches and activations and {free / 2**30:.1f} GiB are free on {self.device}; lower either of them."
            )


def _no_room(num_rows: int, index: int, cfg: LabConfig) -> LabError:
    p = cfg.parallel
    return LabError(
        f"dispatcher={p.dispatcher!r}: {num_rows} rows found no room on their experts' rank by round {index} with "
        f"capacity_factor={p.capacity_factor}, so their outputs are wrong; raise it (1 always suffices), or spread the load: "
        "placement='balanced'."
    )
