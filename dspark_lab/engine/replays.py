"""`RoundGraphs`: draft and verify of a round as two captured graphs a bucket (one without speculation), and what fills the scalar's slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.engine.graphs import Checks, GraphRunner, StaticInput
from dspark_lab.engine.rounds import Rounds
from dspark_lab.errors import LabError


class RoundGraphs:
    """Two `GraphRunner`s over one `Rounds`. The batch's state lies in static buffers that the graphs themselves move on, so a
    replay fills nothing but the scalar's slot."""

    def __init__(
        self,
        rounds: Rounds,
        cfg: LabConfig,
        *,
        buckets: Sequence[int] | None = None,
        tiers: Sequence[int] | None = None,
        checks: Checks = Checks(),  # noqa: B008 - frozen
    ) -> None:
        """``buckets``: which to capture; by default all that the batch can shrink to. ``tiers``: row counts of the verify
        graphs, where blocks are not whole."""
        self.rounds, self.cfg = rounds, cfg
        self.buckets = buckets or [b for b in cfg.engine.buckets if b <= rounds.state.max_rows]
        self._predicate = cfg.needs_scalar
        self._writes_slot = cfg.engine.how.transfer == "graph_slot"
        self._slots_hold: dict[str, int] = {}
        self.drafts = self._runner("draft", rounds.draft, rounds.query_len, checks) if rounds.gamma else None
        self.tiers = tiers
        if tiers is None:
            self.verifies = self._runner("verify", rounds.verify, rounds.width, checks)
        else:
            self.verifies = self._tier_runner(tiers, checks)
        self.capture()

    def capture(self) -> None:
        """Captures both over padded rows only, which write to the dummy slot: no request's cache is touched."""
        table = self.rounds.state.table.clone()
        self.rounds.state.clear()
        for runner in self._runners:
            runner.capture()
        self.rounds.state.table.copy_(table)

    def draft(self, bs: int, scalar: Tensor | None, *, num_slots: int | None = None) -> None:
        """Replays the draft graph for ``bs`` requests. ``scalar`` is what the strategy made; unused where nobody reads it.

        ``num_slots`` chooses the bucket: all replicas replay the one that holds the fullest of them. By default ``bs``.
        """
        assert self.drafts is not None, "nobody drafts without speculation"
        slots = bs if num_slots is None else num_slots
        self._admit(self.drafts, slots)
        if not self._predicate:
            self.drafts.replay(slots)
            return
        given = self._slot_value(self.drafts, bs) if self._writes_slot else scalar
        self.drafts.replay(slots, num_token_non_padded=given)

    def verify(self, bs: int, *, num_slots: int | None = None) -> None:
        """Replays the verify graph; its count goes straight into the slot, under every strategy, where it is not there yet."""
        slots = bs if num_slots is None else num_slots
        self._admit(self.verifies, slots)
        given = self._slot_value(self.verifies, bs) if self._predicate else None
        self.verifies.replay(slots, num_token_non_padded=given)

    def verify_rows(self, num_rows: int) -> None:
        """Replays the verify graph of the smallest tier that holds ``num_rows`` compact rows."""
        self._admit(self.verifies, num_rows)
        self.verifies.replay(
            num_rows, num_token_non_padded=self._slot_value(self.verifies, num_rows) if self._predicate else None
        )

    def report(self) -> list[dict[str, Any]]:
        """Capture time and memory by graph and bucket."""
        return [row for runner in self._runners for row in runner.report()]

    def destroy(self) -> None:
        for runner in self._runners:
            runner.destroy()

    @property
    def _runners(self) -> list[GraphRunner]:
        return [self.verifies] if self.drafts is None else [self.drafts, self.verifies]

    def _slot_value(self, runner: GraphRunner, bs: int) -> Tensor | int:
        """The count, or the slot itself where it holds that count already: then nothing is written."""
        n, slot = bs * runner.width, runner.slot
        assert slot is not None
        if self._slots_hold.get(runner.name) == n:
            return slot
        self._slots_hold[runner.name] = n
        return n

    @staticmethod
    def _admit(runner: GraphRunner, bs: int) -> None:
        reason = runner.refusal(bs)
        if reason is not None:
            raise LabError(f"{runner.name} graph cannot be replayed: {reason}.")

    def _runner(self, name: str, fn: Callable[..., None], width: int, checks: Checks) -> GraphRunner:
        rounds, context = self.rounds, self.rounds.context_len

        def captured(rows: Tensor, num_token_non_padded: Tensor | None = None) -> Tensor:
            b = rows.shape[0]
            fn(b, max_keys=context, num_requests=b, num_token_non_padded=num_token_non_padded)
            return rounds.packed[:b]

        return self._graph_runner(captured, rounds.state.anchors, self.buckets, width, checks, name)

    def _tier_runner(self, tiers: Sequence[int], checks: Checks) -> GraphRunner:
        """Verify graphs by rows. A tier of T rows has room for T requests, or for all that there are."""
        rounds, context = self.rounds, self.rounds.context_len

        def captured(rows: Tensor, num_token_non_padded: Tensor | None = None) -> Tensor:
            b = min(rows.shape[0], rounds.state.max_rows)
            rounds.verify(
                b,
                max_keys=context,
                num_requests=b,
                num_token_non_padded=num_token_non_padded,
                compact_rows=rows.shape[0],
            )
            return rounds.packed[:b]

        markers = torch.zeros(max(tiers), dtype=torch.int64, device=rounds.device)  # there is nothing to fill in
        return self._graph_runner(captured, markers, tiers, 1, checks, "verify")

    def _graph_runner(
        self,
        captured: Callable[..., Tensor],
        rows: Tensor,
        buckets: Sequence[int],
        width: int,
        checks: Checks,
        name: str,
    ) -> GraphRunner:
        rounds = self.rounds
        return GraphRunner(
            captured,
            {"rows": StaticInput(buffer=rows, pad=None)},
            buckets=buckets,
            device=rounds.device,
            width=width,
            predicate=lambda: self._predicate,
            state=lambda: {"table": rounds.state.table, "num_rounds": rounds.num_rounds},
            watch=lambda: {
                "target cache": rounds.target_cache.k,
                "draft cache": rounds.draft_cache.k,
                "state": rounds.state.table,
                "drafts": rounds.drafts,
                **({} if rounds.sent is None else {"results": rounds.sent}),
            },
            barrier=_barrier,
            checks=checks,
            name=name,
        )


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
