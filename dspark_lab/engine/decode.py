"""The decode loop on the host: requests join, rounds are launched, results come back some rounds later.

With ``overlap`` the host prepares round n + 1 while the device runs n: results are read ``LAG`` rounds late, in pinned
memory behind an event, so no wait is ever on work younger than that. Without, each round is read at once: the simple loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark_lab.config import LabConfig
from dspark_lab.device import device_name, phase
from dspark_lab.engine.agree import Agreement
from dspark_lab.engine.demands import Demands, sampling_of
from dspark_lab.engine.flights import Flights, Round
from dspark_lab.engine.halves import Halves
from dspark_lab.engine.prefill import Prefill
from dspark_lab.engine.relay import BudgetRelay, sts_scales
from dspark_lab.engine.replays import RoundGraphs
from dspark_lab.engine.request import Request
from dspark_lab.engine.rounds import Rounds
from dspark_lab.engine.runnable import check_device, check_runnable
from dspark_lab.ep.groups import ParallelGroups
from dspark_lab.errors import LabError
from dspark_lab.models.decoder import Target
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.plan.padding import bucket_for, chunk_ranks, slots_of, usable_buckets
from dspark_lab.plan.tiers import tiers_of

LAG = 2
"""Rounds between a launch and the reading of its results, with ``overlap``."""


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
        self.cfg, self.target, self.drafter, self.device = cfg, target, drafter, device
        self.gamma = cfg.gamma
        parallel, groups = cfg.parallel, groups or ParallelGroups()
        self.groups = groups
        check_device(cfg, device, groups.control)
        self.agreement = Agreement(control=groups.control, rows_ranks=parallel.rows_ranks)
        self.slots = slots_of(cfg.engine.batch_size, parallel.attn_dp, groups.replica)
        """Slots of the batch that this rank's replica serves, by their number in the caches."""
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
        self.relay = BudgetRelay(cfg, device_name(device)) if self.rounds.is_scheduled else None
        self._flights = Flights(cfg, self.rounds, depth, control=groups.control, relay=self.relay)
        self.tiers: list[int] | None = None
        """Row counts of a compact verify forward; None where blocks are whole."""
        if cfg.engine.layout == "compact" and self.gamma:
            fitting = [b for b in self.buckets if b <= max_rows]
            self.tiers = tiers_of(fitting, width=self.gamma + 1, chunks=chunk_ranks(parallel))
        self.active: list[Request] = []
        self.num_steps = 0
        self._halves = Halves(cfg, self.rounds, self.tiers)
        self._prefill = Prefill(cfg, self.rounds, self._halves.scalar)
        self.reset()
        if buckets is None:
            buckets = [b for b in self.buckets if b <= max_rows]
        if cfg.engine.use_graph:
            self.graphs = RoundGraphs(self.rounds, cfg, buckets=buckets, tiers=self.tiers)

    @property
    def graphs(self) -> RoundGraphs | None:
        """Both halves of a round as graphs; None where they run call by call."""
        return self._halves.graphs

    @graphs.setter
    def graphs(self, graphs: RoundGraphs | None) -> None:
        self._halves.graphs = graphs

    @property
    def host_work_us(self) -> list[float]:
        """What the host was kept busy in each round since the last reset."""
        return self._halves.host_work_us

    # -- requests ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all requests; caches keep their memory. Arms may share the models, so what they differ in there is set here."""
        self.active, self.num_steps, self._halves.host_work_us = [], 0, []
        self.num_real_rows, self.num_padded_rows = 0, 0
        self.rounds.proposer.scalar.host_ns.clear()
        self._flights.clear()
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
        self._flights.prefilled(request, first, self.num_steps)

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
        self._halves.draft(bs, b, max_keys=max_keys, num_slots=num_slots)
        with phase("dspark::verify"):
            verified = self._halves.verify(bs, b, budget, max_keys=max_keys, num_slots=num_slots)
        drafted = self.rounds.rows_a_request - self.rounds.width
        self.num_real_rows += bs * drafted + verified[0]
        self.num_padded_rows += b * drafted + verified[1]
        with phase("dspark::accept"):
            if bs:
                self._flights.launched(self.active, self.num_steps)
            self.num_steps += 1
            return early + self._receive()

    def _max_keys(self) -> int:
        """An upper bound of what attention reads, known to the host although results are still in flight."""
        if not self.active:
            return self.gamma + 1
        unread = self._flights.num_rounds + 1
        reach = max(min(r.seq_len + (self.gamma + 1) * unread, r.limit) for r in self.active)
        return min(reach + self.gamma + 1, self.rounds.context_len)

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
        graphs = int(self.graphs is not None)
        shape = {"prefill_rows": prefill_rows, "requests": len(self.active), "graphs": graphs, "verify_budget": budget}
        self.agreement.confirm(what, shape, self._flights.unconfirmed())

    def _receive(self) -> list[Round]:
        """Reads results that are at least ``lag`` rounds old; newer ones stay in flight."""
        return self._receive_until(self.num_steps - self.lag - 1 + (not self.lag))

    def _receive_until(self, index: int) -> list[Round]:
        """Reads results up to round ``index``, and lets requests go that have finished by them."""
        if not self._flights.due(index):
            return []
        done = self._flights.read(index)
        self._retire()
        return done

    def drain(self) -> list[Round]:
        """Waits for everything in flight."""
        done = self._flights.read_all()
        self._retire()
        self.agreement.close()
        return done

    def idle_step(self) -> None:
        """A round with no request: joins every collective with padded rows only, count 0, and commits nothing."""
        if self.active:
            raise LabError(f"an idle round is for a rank without requests; this one has {len(self.active)}.")
        self._halves.idle()
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
