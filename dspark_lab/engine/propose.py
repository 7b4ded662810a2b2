"""`DraftBlockProposer`: one draft forward a round, from the anchor to γ draft tokens. Eager and captured run the same lines."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_kernels.rounds import Rows
from dspark_lab.config import LabConfig
from dspark_lab.engine.alloc import ScalarSource
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.drafter import Pick, Proposal
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.models.kvcache import KVCache


class DraftBlockProposer:
    """Builds the draft batch as SGLang's does (bs·γ tokens with DSpark, mode TARGET_VERIFY) and runs the drafter on it."""

    def __init__(self, cfg: LabConfig, drafter: AnyDrafter, cache: KVCache, device: torch.device) -> None:
        self.cfg = cfg
        self.drafter = drafter
        self.cache = cache
        self.scalar = ScalarSource(cfg.engine.how, cfg.parallel, device)
        self.gamma, self.query_len = cfg.model.drafter.block_size, cfg.model.drafter.query_len
        self._device = device

    def build_batch(
        self,
        rows: Rows,
        *,
        max_keys: int,
        num_requests: int,
        num_token_non_padded: Tensor | None,
    ) -> ForwardBatch:
        """The draft batch of ``rows`` (`block_rows` of anchors and mask tokens), ``num_requests`` of them real and first.

        The device scalar comes from the strategy under test.
        """
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if num_requests else ForwardMode.IDLE,
            batch_size=rows.req_slots.shape[0],
            num_tokens_per_req=self.query_len,
            input_ids=rows.input_ids,
            positions=rows.positions,
            req_slots=rows.req_slots,
            slots_by_row=rows.token_slots,
            key_limits=rows.key_limits,
            max_keys=max_keys,
            num_token_non_padded=num_token_non_padded,
            num_token_non_padded_cpu=num_requests * self.query_len,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def propose(
        self, batch: ForwardBatch, anchors: Tensor, *, with_confidence: bool = False, pick: Pick | None = None
    ) -> Proposal:
        """A block of each request; ``pick`` None is greedy. Confidence is computed only where somebody reads it."""
        return self.drafter.draft(batch, self.cache, anchors, with_confidence=with_confidence, pick=pick)
