"""`Rounds`: the device side of one round as two functions, draft and verify, over the batch's state. Called eagerly or captured."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_kernels import accept as kernels
from dspark_lab.config import LabConfig
from dspark_lab.engine.propose import DraftBlockProposer
from dspark_lab.engine.state import BatchState
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.spec.accept import Accepted, greedy_accept, simulated_accepts

SIMULATED_STEPS = 4096
"""Simulated accept lengths drawn ahead; the loop wraps round after that many rounds."""


class Rounds:
    """Owns what a round reads and writes: caches, state, drafted blocks, packed results."""

    def __init__(self, cfg: LabConfig, target: Target, drafter: Drafter, device: torch.device, max_rows: int) -> None:
        self.cfg, self.target, self.drafter, self.device = cfg, target, drafter, device
        self.gamma = cfg.model.drafter.block_size
        self.width = self.gamma + 1
        self.target_cache = target.new_cache(cfg.engine.batch_size, cfg.model.context_len)
        self.draft_cache = drafter.new_cache(cfg.engine.batch_size, cfg.model.context_len)
        self.state = BatchState(max_rows, self.target_cache.dummy_slot, device)
        self.proposer = DraftBlockProposer(cfg, drafter, self.draft_cache, device)
        self.drafts = torch.zeros(max_rows, self.gamma, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.packed = torch.zeros(max_rows, self.width + 2, dtype=torch.int64, device=device)
        """[rows, W + 2]: committed tokens, how many (0: the row took no part), drafts verified."""
        self.num_rounds = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = torch.arange(self.width, device=device)
        self._simulated = self._draw_simulated(max_rows)

    def draft(self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None) -> None:
        """γ draft tokens for the first ``b`` rows into `drafts` and `lengths`."""
        anchors, seq_lens, slots, _ = self._rows(b)
        batch = self.proposer.build_batch(
            anchors=anchors,
            seq_lens=seq_lens,
            slots=slots,
            max_keys=max_keys,
            num_requests=num_requests,
            num_token_non_padded=num_token_non_padded,
        )
        drafts, lengths = self.proposer.propose(batch, anchors)
        self.drafts[:b].copy_(drafts)
        self.lengths[:b].copy_(lengths)

    def verify(self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None) -> None:
        """Target forward, acceptance and commit for the first ``b`` rows; results into `packed`, the state moves on."""
        _, _, slots, taking_part = self._rows(b)
        batch = self.build_verify_batch(
            b, max_keys=max_keys, num_requests=num_requests, num_token_non_padded=num_token_non_padded
        )
        out = self.target.forward(batch, self.target_cache, capture_layers=self.cfg.model.drafter.target_layer_ids)
        target_tokens = self.target.argmax(out.hidden).view(b, self.width)
        accept = kernels.greedy_accept if self.device.type == "cuda" else greedy_accept
        accepted = accept(self.drafts[:b], target_tokens, self.lengths[:b], forced=self._forced(b))
        self._commit(b, accepted, taking_part, slots, out.aux, batch.positions)

    def build_verify_batch(
        self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None
    ) -> ForwardBatch:
        """Anchor and γ drafts a request, causal."""
        anchors, seq_lens, slots, _ = self._rows(b)
        positions = (seq_lens[:, None] + self._columns).flatten()
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if num_requests else ForwardMode.IDLE,
            batch_size=b,
            num_tokens_per_req=self.width,
            input_ids=torch.cat([anchors[:, None], self.drafts[:b]], dim=1).flatten(),
            positions=positions,
            req_slots=slots,
            key_limits=positions + 1,
            max_keys=max_keys,
            num_token_non_padded=num_token_non_padded,
            num_token_non_padded_cpu=num_requests * self.width,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def _rows(self, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Anchors, lengths and slots of the first ``b`` rows as this round sees them, and which of them take part."""
        s = self.state
        taking_part = s.seq_lens[:b] < s.limits[:b]
        seq_lens = torch.where(taking_part, s.seq_lens[:b], 0)
        slots = torch.where(taking_part, s.slots[:b], s.dummy_slot)
        return s.anchors[:b], seq_lens, slots, taking_part

    def _forced(self, b: int) -> Tensor | None:
        if self._simulated is None:
            return None
        forced = self._simulated.index_select(0, self.num_rounds % SIMULATED_STEPS)[0, :b]
        self.num_rounds += 1
        return forced

    def _commit(
        self,
        b: int,
        accepted: Accepted | kernels.Accepted,
        taking_part: Tensor,
        slots: Tensor,
        aux: Tensor,
        positions: Tensor,
    ) -> None:
        """Draft context for the anchor and the kept drafts; rejected rows go to the dummy slot. Target KV is cut by length."""
        s = self.state
        committed = torch.where(taking_part, accepted.num_accepted + 1, 0)
        keep = self._columns[None] < committed[:, None]
        context_slots = torch.where(keep, slots[:, None], s.dummy_slot)
        self.drafter.write_context(aux, context_slots.flatten(), positions, self.draft_cache)
        s.seq_lens[:b].add_(committed)
        s.anchors[:b].copy_(torch.where(taking_part, accepted.bonus, s.anchors[:b]))
        packed = torch.cat([accepted.out_tokens, committed[:, None], self.lengths[:b, None]], dim=1)
        self.packed[:b].copy_(packed)

    def _draw_simulated(self, max_rows: int) -> Tensor | None:
        length = self.cfg.engine.simulated_accept_length
        if length is None:
            return None
        return simulated_accepts(length, SIMULATED_STEPS, max_rows, self.cfg.seed).to(self.device)
