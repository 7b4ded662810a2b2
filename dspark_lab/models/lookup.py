"""`LookupDrafter`: prompt lookup, a drafter without a model. What followed the last tokens the last time is drafted again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.config.parts import ModelConfig
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.decoder import DecoderLayer
from dspark_lab.models.drafter import Pick, Proposal
from dspark_lab.models.kvcache import KVCache
from dspark_lab.models.moe import MoE

NGRAMS = (3, 2, 1)
"""Lengths of the suffix that is looked for, the longest first."""


class TokenCache(KVCache):
    """Each slot's committed tokens, by position; no keys and no values."""

    def __init__(self, num_slots: int, context_len: int, device: torch.device | str) -> None:
        super().__init__(0, num_slots, context_len, 1, 1, torch.float32, device)
        self.tokens = torch.full((num_slots + 1, context_len), -1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes

    def reset(self) -> None:
        self.tokens.fill_(-1)


class LookupDrafter(nn.Module):
    """Drafts the continuation of the latest earlier place at which the last n tokens stand, n of `NGRAMS`; nothing where there is none."""

    def __init__(self, cfg: ModelConfig, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.block_size, self.query_len = cfg.drafter.block_size, 1
        self.mask_token_id = cfg.drafter.mask_token_id
        self.device = torch.device(device)
        self.decoder_layers: list[DecoderLayer] = []
        self.moe_layers: list[MoE] = []
        self.num_bytes = 0

    def new_cache(self, num_slots: int, context_len: int) -> TokenCache:
        return TokenCache(num_slots, context_len, self.device)

    def watch_load(self) -> Any:
        """There are no experts to count."""
        return None

    def write_context(
        self, aux: Tensor, slots: Tensor, positions: Tensor, cache: KVCache, tokens: Tensor | None = None
    ) -> None:
        """Keeps the ``tokens`` [T] of committed rows at ``slots``, ``positions`` [T]."""
        assert isinstance(cache, TokenCache)
        assert tokens is not None, "tokens are all that it reads"
        cache.tokens[slots, positions] = tokens

    def draft(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        anchors: Tensor,
        *,
        with_confidence: bool = True,
        pick: Pick | None = None,
    ) -> Proposal:
        """Up to γ tokens a request from ``anchors`` [B], which stand at ``batch.positions`` [B]; shapes depend on no value.

        It finds its tokens and has nothing to ``pick`` from.
        """
        assert isinstance(cache, TokenCache)
        history, last = cache.tokens[batch.req_slots], batch.positions
        history = history.scatter(1, last[:, None], anchors[:, None])
        place = torch.arange(history.shape[1], device=history.device)
        found = torch.full_like(last, -1)
        for n in NGRAMS:
            found = torch.where(found >= 0, found, _latest(history, last, place, n))
        ahead = (found[:, None] + 1 + torch.arange(self.block_size, device=history.device)).clamp(
            max=history.shape[1] - 1
        )
        lengths = torch.where(found >= 0, (last - found).clamp(max=self.block_size), 0)
        drafts = history.gather(1, ahead).clamp(min=0)
        logits = torch.empty(0, device=history.device)
        return Proposal(
            draft_tokens=drafts, base_logits=logits, corrected_logits=None, confidence=None, lengths=lengths
        )


def _latest(history: Tensor, last: Tensor, place: Tensor, n: int) -> Tensor:
    """[B] the latest position before ``last`` [B] at which the ``n`` tokens that end at ``last`` end too; −1 without one."""
    same = (place[None] < last[:, None]) & (place[None] >= n - 1) & (last >= n - 1)[:, None]
    for back in range(n):
        token = history.gather(1, (last - back).clamp(min=0)[:, None])
        same &= history.roll(back, dims=1) == token
    return torch.where(same, place, -1).amax(dim=1)
