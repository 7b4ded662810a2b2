"""`Drafter`: a DSpark draft model. One parallel forward over a block, then a sequential walk through the Markov head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_kernels.markov import markov_walk
from dspark_kernels.norm import add_rms_norm
from dspark_kernels.qkv import k_norm_rope_write
from dspark_lab.config.parts import ModelConfig
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.models import fused
from dspark_lab.models.attention import RMSNorm
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.decoder import Decoder, DecoderLayer
from dspark_lab.models.heads import ConfidenceHead, MarkovHead, markov_head
from dspark_lab.models.kvcache import KVCache
from dspark_lab.models.shards import column_linear, linear

Pick = Callable[[int, Tensor], Tensor]
"""(slot 0..γ−1, this rank's corrected logits [B, V_local]) to the draft tokens [B] int64 of that slot."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A drafted block, before any of it is cut."""

    draft_tokens: Tensor
    """[B, γ] int64."""
    base_logits: Tensor
    """[B, γ, V] of the parallel stage; at TP > 1 this rank's columns, which ``drafter.vocab.gather`` puts together."""
    corrected_logits: Tensor | None
    """As `base_logits`, with the Markov head's share; greedy `draft_tokens` are the argmax over the whole vocabulary. None where
    the fused walk ran, which stores none."""
    confidence: Tensor | None
    """[B, γ] float32 within 0 to 1, not cumulative; None without a confidence head, or where nobody asked."""
    lengths: Tensor | None = None
    """[B] int64 where a drafter itself has fewer than γ; None: all are drafted."""


class Drafter(Decoder):
    """Decoder layers with an own embedding and LM head; context K/V come from the target's hidden states."""

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
        rank = drafter.markov_rank
        self.drafter_cfg = drafter
        self.block_size, self.mask_token_id = drafter.block_size, drafter.mask_token_id
        self.query_len = drafter.query_len
        self.fc = linear(len(drafter.target_layer_ids) * draft.hidden_size, draft.hidden_size, **factory)
        self.hidden_norm = RMSNorm(draft.hidden_size, draft.rms_norm_eps, **factory)
        self.lm_head = column_linear(draft.hidden_size, draft.vocab_size, tp, **factory)
        self.markov_head = markov_head(drafter, draft.vocab_size, draft.hidden_size, tp, **factory)
        self.confidence_with_markov = drafter.confidence_head_with_markov and rank > 0
        extra = rank if self.confidence_with_markov else 0
        self.confidence_head = (
            ConfidenceHead(draft.hidden_size, extra, **factory) if drafter.enable_confidence_head else None
        )

    def write_context(
        self, aux: Tensor, slots: Tensor, positions: Tensor, cache: KVCache, tokens: Tensor | None = None
    ) -> None:
        """Stores the context K/V of committed rows: ``aux`` [T, n·H] of the target, ``slots`` and ``positions`` [T].

        ``tokens`` [T] are for other kinds of drafters; this one reads hidden states alone.
        """
        if self.runs_fused and fused.suits(aux):
            self._write_context_fused(aux, slots, positions, cache)
            return
        context = self.hidden_norm(self.fc(aux))
        cos, sin = self.rope(positions, context.dtype)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            k, v = layer.self_attn.keys_values(context, cos, sin)
            cache.write(i, slots, positions, k, v)

    def _write_context_fused(self, aux: Tensor, slots: Tensor, positions: Tensor, cache: KVCache) -> None:
        fc = fused.product(aux, self.fc.weight)
        context, _ = add_rms_norm(fc, None, self.hidden_norm.weight, self.hidden_norm.eps)
        for i, layer in enumerate(self.decoder_layers):
            attention = layer.self_attn
            assert attention.qkv_weight is not None
            kv = fused.product(context, attention.qkv_weight[attention.num_heads * attention.head_dim :])
            weight, eps = attention.k_norm.weight, attention.k_norm.eps
            k_norm_rope_write(kv, weight, positions, self.rope.inv_freq, slots, cache.k[i], cache.v[i], eps)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Hidden states [B, γ, H] of the block after the final norm, of the rows that predict: the k-th the token at anchor + k.

        ``batch`` holds the anchor and mask tokens of each request, `query_len` rows in all: one more than γ where the anchor's
        own row predicts nothing. The block's own K/V go to the cache at their positions, where a later `write_context`
        overwrites those that are committed.
        """
        hidden, _ = self.run(batch, cache)
        return hidden.view(batch.batch_size, batch.num_tokens_per_req, -1)[:, self.query_len - self.block_size :]

    def draft(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        anchors: Tensor,
        *,
        with_confidence: bool = True,
        pick: Pick | None = None,
    ) -> Proposal:
        """A block for each request of ``batch``, from ``anchors`` [B]: what every kind of drafter can do. ``pick`` chooses each
        token, left to right; None takes the likeliest."""
        return self.propose(self.forward(batch, cache), anchors, with_confidence=with_confidence, pick=pick)

    def propose(
        self, block_hidden: Tensor, anchors: Tensor, *, with_confidence: bool = True, pick: Pick | None = None
    ) -> Proposal:
        """Draft tokens from ``block_hidden`` [B, γ, H], left to right from ``anchors`` [B]; greedy ones without ``pick``."""
        base = self.lm_head(block_hidden)
        embedded: Tensor | None = None
        if self.markov_head is None:
            corrected = base
            tokens = self.vocab.argmax(base) if pick is None else _each(pick, base)
        elif pick is None and type(self.markov_head) is MarkovHead and fused.suits(base) and self.tp.size == 1:
            w1, w2 = self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight
            walk = markov_walk(base, anchors, w1, w2)
            corrected, tokens, embedded = None, walk.tokens, walk.embedded
        else:
            corrected, tokens, embedded = self._walk(self.markov_head, base, anchors, block_hidden, pick)
        confidence = None
        if self.confidence_head is not None and with_confidence:
            confidence = self.confidence_head(block_hidden, embedded if self.confidence_with_markov else None)
        return Proposal(draft_tokens=tokens, base_logits=base, corrected_logits=corrected, confidence=confidence)

    def _walk(
        self, head: MarkovHead, base: Tensor, anchors: Tensor, hidden: Tensor, pick: Pick | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Corrected logits as ``base``, tokens [B, γ] and W1 of each token's predecessor [B, γ, r]; one gather a token."""
        previous, state, logits, tokens, embedded = anchors, None, [], [], []
        for k in range(base.shape[1]):
            embedded.append(head.embed(previous))
            bias, state = head.step(embedded[-1], hidden[:, k], state)
            logits.append(base[:, k] + bias)
            previous = self.vocab.argmax(logits[-1]) if pick is None else pick(k, logits[-1])
            tokens.append(previous)
        return torch.stack(logits, dim=1), torch.stack(tokens, dim=1), torch.stack(embedded, dim=1)


def _each(pick: Pick, logits: Tensor) -> Tensor:
    """[B, γ] tokens of slots that do not depend on each other."""
    return torch.stack([pick(k, logits[:, k]) for k in range(logits.shape[1])], dim=1)
