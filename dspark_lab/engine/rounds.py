"""`Rounds`: the device side of one round as two functions, draft and verify, over the batch's state. Called eagerly or captured.

Without speculation a round is `verify` alone, over blocks of one token: its anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_kernels.rounds import Rows, accept_and_commit, block_rows
from dspark_lab.config import LabConfig
from dspark_lab.engine.propose import DraftBlockProposer
from dspark_lab.engine.state import BatchState
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.spec.accept import simulated_accepts

SIMULATED_STEPS = 4096
"""Simulated accept lengths drawn ahead; the loop wraps round after that many rounds."""


class Rounds:
    """Owns what a round reads and writes: caches, state, drafted blocks, packed results."""

    def __init__(
        self,
        cfg: LabConfig,
        target: Target,
        drafter: AnyDrafter,
        device: torch.device,
        max_rows: int,
        *,
        num_slots: int | None = None,
        replica: int = 0,
    ) -> None:
        """``num_slots`` of the caches: by default all of the batch; ``replica``: which attention replica this is."""
        self.cfg, self.target, self.drafter, self.device = cfg, target, drafter, device
        self.gamma = cfg.gamma
        self.width = self.gamma + 1
        self.query_len = cfg.model.drafter.query_len
        """Rows of a request in a forward of the drafter."""
        slots = cfg.engine.batch_size if num_slots is None else num_slots
        self.target_cache = target.new_cache(slots, cfg.model.context_len)
        self.draft_cache = drafter.new_cache(slots, cfg.model.context_len)
        self.state = BatchState(max_rows, self.target_cache.dummy_slot, device)
        self.proposer = DraftBlockProposer(cfg, drafter, self.draft_cache, device)
        self.context_layers = cfg.model.drafter.target_layer_ids if self.gamma else ()
        """Target layers whose outputs are the draft context; none where nobody drafts."""
        self.drafts = torch.zeros(max_rows, self.gamma, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.packed = torch.zeros(max_rows, self.width + 2, dtype=torch.int64, device=device)
        """[rows, W + 2]: committed tokens, how many (0: the row took no part), drafts verified."""
        self._overflows = _overflows(target, drafter)
        self.results = self.packed
        """[rows, W + 2] what the host reads; [rows, W + 3] where dispatchers can lose rows for want of room: how many so far."""
        if self._overflows:
            self.results = torch.zeros(max_rows, self.width + 3, dtype=torch.int64, device=device)
        self.num_rounds = torch.zeros(1, dtype=torch.int64, device=device)
        """Rounds so far: which simulated accept lengths are next."""
        self._simulated = self._draw_simulated(max_rows, replica)

    @property
    def rows_a_request(self) -> int:
        """Rows that target and drafter compute for a request in a round."""
        drafted = self.gamma if self.query_len == 1 else self.query_len
        return self.width + (drafted if self.gamma else 0)

    def draft(self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None) -> None:
        """γ draft tokens for the first ``b`` rows into `drafts` and `lengths`."""
        batch = self.proposer.build_batch(
            self.draft_rows(b),
            max_keys=max_keys,
            num_requests=num_requests,
            num_token_non_padded=num_token_non_padded,
        )
        drafts, lengths = self.proposer.propose(batch, self.state.anchors[:b])
        self.drafts[:b].copy_(drafts)
        self.lengths[:b].copy_(lengths)

    def verify(self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None) -> None:
        """Target forward, acceptance and commit for the first ``b`` rows; results into `packed`, the state moves on."""
        s = self.state
        batch = self.build_verify_batch(
            b, max_keys=max_keys, num_requests=num_requests, num_token_non_padded=num_token_non_padded
        )
        out = self.target.forward(batch, self.target_cache, capture_layers=self.context_layers)
        target_tokens = self.target.argmax(out.hidden).view(b, self.width)
        context_slots = accept_and_commit(
            self.drafts[:b],
            self.lengths[:b],
            target_tokens,
            s.anchors[:b],
            s.seq_lens[:b],
            s.slots[:b],
            s.limits[:b],
            self.packed[:b],
            self._simulated,
            self.num_rounds,
            dummy_slot=s.dummy_slot,
        )
        if self.gamma:
            # Context for the anchor and the kept drafts; rejected rows go to the dummy slot. Target K/V are cut by length.
            self.drafter.write_context(out.aux, context_slots, batch.positions, self.draft_cache, batch.input_ids)
        if self._overflows:
            self.results[:b, :-1].copy_(self.packed[:b])
            self.results[:b, -1:].copy_(torch.cat(self._overflows).sum())

    def draft_rows(self, b: int) -> Rows:
        """Anchor and the mask tokens behind it of the first ``b`` requests."""
        return self._rows(b, None, self.query_len)

    def build_verify_batch(
        self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None
    ) -> ForwardBatch:
        """Anchor and γ drafts a request, causal."""
        rows = self._rows(b, self.drafts[:b], self.width)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if num_requests else ForwardMode.IDLE,
            batch_size=b,
            num_tokens_per_req=self.width,
            input_ids=rows.input_ids,
            positions=rows.positions,
            req_slots=rows.req_slots,
            slots_by_row=rows.token_slots,
            key_limits=rows.key_limits,
            max_keys=max_keys,
            num_token_non_padded=num_token_non_padded,
            num_token_non_padded_cpu=num_requests * self.width,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def _rows(self, b: int, drafts: Tensor | None, width: int) -> Rows:
        s = self.state
        return block_rows(
            s.anchors[:b],
            s.seq_lens[:b],
            s.slots[:b],
            s.limits[:b],
            drafts,
            width=width,
            mask_token=self.cfg.model.drafter.mask_token_id,
            dummy_slot=s.dummy_slot,
        )

    def _draw_simulated(self, max_rows: int, replica: int) -> Tensor | None:
        length = self.cfg.engine.simulated_accept_length
        if length is None or not self.gamma:
            return None
        num_replicas = self.cfg.parallel.attn_dp
        drawn = simulated_accepts(length, SIMULATED_STEPS, max_rows * num_replicas, self.cfg.seed)
        return drawn[:, replica::num_replicas].contiguous().to(self.device)


def _overflows(target: Target, drafter: AnyDrafter) -> list[Tensor]:
    """Counters of the dispatchers that can lose rows."""
    layers = [*target.model.moe_layers, *drafter.moe_layers]
    counters = [getattr(layer.dispatcher, "overflow", None) for layer in layers]
    return [c for c in counters if c is not None]
