"""`DraftBlockProposer`: one draft forward a round, from the anchor to γ draft tokens. Eager and captured run the same lines."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.engine.alloc import ScalarSource
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.kvcache import KVCache
from dspark_lab.spec.accept import proposal_lengths


class DraftBlockProposer:
    """Builds the draft batch as SGLang's does (bs·γ tokens, mode TARGET_VERIFY) and runs the drafter on it."""

    def __init__(self, cfg: LabConfig, drafter: Drafter, cache: KVCache, device: torch.device) -> None:
        self.cfg = cfg
        self.drafter = drafter
        self.cache = cache
        self.scalar = ScalarSource(cfg.engine.how, cfg.parallel, device)
        self.gamma = cfg.model.drafter.block_size
        self._columns = torch.arange(self.gamma, device=device)
        self._device = device

    def build_batch(
        self,
        *,
        anchors: Tensor,
        seq_lens: Tensor,
        slots: Tensor,
        max_keys: int,
        num_requests: int,
        num_token_non_padded: Tensor | None,
    ) -> ForwardBatch:
        """The draft batch of ``B`` rows, ``num_requests`` of them real and first: anchor and γ−1 mask tokens a request.

        ``anchors``, ``seq_lens``, ``slots`` [B]; the device scalar comes from the strategy under test.
        """
        gamma, b = self.gamma, anchors.shape[0]
        mask = torch.full((b, gamma - 1), self.cfg.model.drafter.mask_token_id, device=self._device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if num_requests else ForwardMode.IDLE,
            batch_size=b,
            num_tokens_per_req=gamma,
            input_ids=torch.cat([anchors[:, None], mask], dim=1).flatten(),
            positions=(seq_lens[:, None] + self._columns).flatten(),
            req_slots=slots,
            key_limits=(seq_lens[:, None] + gamma).expand(-1, gamma).flatten(),
            max_keys=max_keys,
            num_token_non_padded=num_token_non_padded,
            num_token_non_padded_cpu=num_requests * gamma,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def propose(self, batch: ForwardBatch, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Draft tokens [B, γ] and how many of them to verify [B], both int64."""
        hidden = self.drafter.forward(batch, self.cache)
        proposal = self.drafter.propose(hidden, anchors)
        threshold = self.cfg.engine.confidence_threshold
        b = anchors.shape[0]
        return proposal.draft_tokens, proposal_lengths(proposal.confidence, threshold, b, self.gamma, self._device)
