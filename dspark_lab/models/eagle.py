"""`EagleDrafter`: an autoregressive drafter after EAGLE-3, the baseline that drafts one token after another.

One decoder layer reads [embedding of token x_p ; fused target feature of position p − 1] at position p. The first draft step
does so at the anchor; each later one has its own output in the place of the feature. γ forwards of one row a request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dspark_lab.config.parts import ModelConfig
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.models.attention import Attention, RMSNorm, rows_of
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.decoder import Decoder
from dspark_lab.models.drafter import Pick, Proposal
from dspark_lab.models.kvcache import KVCache
from dspark_lab.models.shards import column_linear, linear


class EagleCache(KVCache):
    """K and V of the one layer, and the fused target feature of each position."""

    features: Tensor
    """[num_slots + 1, context_len, H]."""

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.features.nbytes


class EagleDrafter(Decoder):
    """One decoder layer over token and feature; parameter names as in `Drafter`, and ``layers.0.hidden_norm`` for the feature."""

    def __init__(
        self,
        cfg: ModelConfig,
        group: ExpertGroup | None = None,
        tp: RankGroup = ONE_RANK,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(cfg.draft, group, tp, device=device, dtype=dtype)
        draft, drafter, factory = cfg.draft, cfg.drafter, {"device": device, "dtype": dtype}
        self.drafter_cfg, self.block_size = drafter, drafter.block_size
        self.query_len = 1
        layer = self.layer
        layer.self_attn = Attention(draft, tp, in_features=2 * draft.hidden_size, **factory)
        layer.hidden_norm = RMSNorm(draft.hidden_size, draft.rms_norm_eps, **factory)
        self.fc = linear(len(drafter.target_layer_ids) * draft.hidden_size, draft.hidden_size, **factory)
        self.lm_head = column_linear(draft.hidden_size, draft.vocab_size, tp, **factory)

    @property
    def layer(self) -> Any:
        """The one `DecoderLayer`, with a ``hidden_norm`` beside its other norms."""
        return self.layers[0]

    def new_cache(self, num_slots: int, context_len: int) -> EagleCache:
        c, heads = self.cfg, self.cfg.num_key_value_heads // self.tp.size
        cache = EagleCache(1, num_slots, context_len, heads, c.head_dim, self.dtype, self.device)
        cache.features = torch.zeros(num_slots + 1, context_len, c.hidden_size, dtype=self.dtype, device=self.device)
        return cache

    def layer_input(self, tokens: Tensor, feature: Tensor) -> Tensor:
        """``tokens`` [..] and the ``feature`` [.., H] of the position before each, to what attention reads, [.., 2H]."""
        embedded = self.embed_tokens(tokens)
        return torch.cat((self.layer.input_layernorm(embedded), self.layer.hidden_norm(feature)), dim=-1)

    def write_context(
        self, aux: Tensor, slots: Tensor, positions: Tensor, cache: KVCache, tokens: Tensor | None = None
    ) -> None:
        """Stores the K/V of committed rows: ``aux`` [T, n·H] of the target, ``slots``, ``positions``, ``tokens`` [T].

        A row's K/V need the feature of the position before; that of position 0 is zero.
        """
        assert isinstance(cache, EagleCache)
        assert tokens is not None, "a row's K/V need its token"
        cache.features[slots, positions] = self.fc(aux)
        before = cache.features[slots, (positions - 1).clamp(min=0)]
        x = self.layer_input(tokens, torch.where((positions > 0)[:, None], before, 0.0))
        cos, sin = self.rope(positions, x.dtype)
        k, v = self.layer.self_attn.keys_values(x, cos, sin)
        cache.write(0, slots, positions, k, v)

    def draft(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        anchors: Tensor,
        *,
        with_confidence: bool = True,
        pick: Pick | None = None,
    ) -> Proposal:
        """Draft tokens [B, γ] from ``anchors`` [B], greedy without ``pick``; ``batch`` holds one row a request, the anchor's.

        Every step writes its K/V at its own position, where `write_context` overwrites those that are committed.
        """
        assert isinstance(cache, EagleCache)
        before = cache.features[batch.req_slots, (batch.positions - 1).clamp(min=0)]
        state = torch.where((batch.positions > 0)[:, None], before, 0.0)
        previous, logits, tokens = anchors, [], []
        for k in range(self.block_size):
            positions = batch.positions + k
            at = replace(
                batch,
                input_ids=previous,
                positions=positions,
                key_limits=positions + 1,
                max_keys=min(batch.max_keys + k, cache.context_len),
            )
            state = self._forward(at, cache, state)
            logits.append(self.lm_head(self.norm(state)))
            previous = self.vocab.argmax(logits[-1]) if pick is None else pick(k, logits[-1])
            tokens.append(previous)
        stacked = torch.stack(logits, dim=1)
        return Proposal(
            draft_tokens=torch.stack(tokens, dim=1), base_logits=stacked, corrected_logits=stacked, confidence=None
        )

    def _forward(self, batch: ForwardBatch, cache: EagleCache, feature: Tensor) -> Tensor:
        """The layer's raw output [B, H] on one row a request."""
        x = self.layer_input(batch.input_ids, feature)
        rows = rows_of(batch, cache, self.rope, self.cfg, x.dtype)
        x = feature + self.layer.self_attn(x, 0, rows)
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x), batch)
