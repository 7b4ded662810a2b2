"""How many bytes a config needs on one rank, before anything is allocated. Pure arithmetic on shapes."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_lab.config import DecoderConfig, LabConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights_bytes: int
    cache_bytes: int
    logits_bytes: int
    """The largest activations: prefill and verify logits in float32, and the gathered keys and values of one layer."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.logits_bytes


def plan_memory(cfg: LabConfig) -> MemoryPlan:
    """Weights (this rank's experts only), KV caches (dummy slot included) and the largest activations of ``cfg``."""
    m, e = cfg.model, cfg.engine
    item = ITEM_BYTES[m.dtype]
    d, gamma = m.drafter, m.drafter.block_size
    head = 0 if d.markov_rank == 0 else 2 * m.draft.vocab_size * d.markov_rank
    fc = len(d.target_layer_ids) * m.target.hidden_size * m.draft.hidden_size
    ep = cfg.parallel.ep_size
    weights = _decoder_params(m.target, ep) + _decoder_params(m.draft, ep) + head + fc
    slots = e.batch_size + 1
    cache = sum(2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim for c in (m.target, m.draft))
    bucket = min((b for b in e.buckets if b >= e.batch_size), default=e.batch_size)
    rows = bucket * (gamma + 1)
    gathered = 2 * bucket * m.context_len * m.target.num_key_value_heads * m.target.head_dim * item
    return MemoryPlan(
        weights_bytes=weights * item,
        cache_bytes=cache * slots * m.context_len * item,
        logits_bytes=3 * 4 * rows * m.target.vocab_size + 3 * gathered,
    )


def _decoder_params(c: DecoderConfig, ep_size: int) -> int:
    heads = c.num_attention_heads * c.head_dim
    attention = c.hidden_size * (2 * heads + 2 * c.num_key_value_heads * c.head_dim)
    dense = 3 * c.hidden_size * c.intermediate_size
    moe = c.num_experts * c.hidden_size + 3 * c.hidden_size * c.moe_intermediate_size * (c.num_experts // ep_size)
    num_moe = c.num_moe_layers
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return c.num_hidden_layers * attention + num_moe * moe + (c.num_hidden_layers - num_moe) * dense + embeddings
