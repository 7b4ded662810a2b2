"""How many bytes a config needs on one rank, before anything is allocated. Pure arithmetic on shapes."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_lab.config import DecoderConfig, LabConfig, ParallelConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights_bytes: int
    cache_bytes: int
    logits_bytes: int
    """The largest activations: this rank's prefill and verify logits in float32, and the gathered K and V of one layer."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.logits_bytes


def plan_memory(cfg: LabConfig) -> MemoryPlan:
    """Weights, KV caches (dummy slot included) and the largest activations of ``cfg``: this rank's part of each."""
    m, e = cfg.model, cfg.engine
    item = ITEM_BYTES[m.dtype]
    d, gamma = m.drafter, m.drafter.block_size
    p = cfg.parallel
    vocab = -(-m.target.vocab_size // p.tp_size)  # of target and drafter; the largest part where it does not divide
    markov = (m.draft.vocab_size + vocab) * d.markov_rank  # W1 whole, W2 cut
    fc = len(d.target_layer_ids) * m.target.hidden_size * m.draft.hidden_size
    weights = _decoder_params(m.target, p) + _decoder_params(m.draft, p) + markov + fc
    batch_size = -(-e.batch_size // p.attn_dp)  # of the fullest attention replica
    slots = batch_size + 1
    kv_rows = sum(c.num_hidden_layers * (c.num_key_value_heads // p.tp_size) * c.head_dim for c in (m.target, m.draft))
    bucket = min((b for b in e.buckets if b >= batch_size), default=batch_size)
    rows = bucket * (gamma + 1)
    gathered = 2 * bucket * m.context_len * (m.target.num_key_value_heads // p.tp_size) * m.target.head_dim * item
    return MemoryPlan(
        weights_bytes=weights * item,
        cache_bytes=2 * kv_rows * slots * m.context_len * item,
        logits_bytes=3 * 4 * rows * vocab + 3 * gathered,
    )


def _decoder_params(c: DecoderConfig, p: ParallelConfig) -> int:
    attention = 2 * c.hidden_size * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim // p.tp_size
    dense = 3 * c.hidden_size * c.intermediate_size // p.tp_size
    experts = (
        3
        * c.hidden_size
        * (c.moe_intermediate_size // p.moe_tp)
        * ((c.num_experts + p.num_redundant_experts) // p.ep_size)
    )
    moe = c.num_experts * c.hidden_size + experts  # the router is whole
    num_moe = c.num_moe_layers
    embeddings = -(-c.vocab_size // p.tp_size) * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    norms = 2 * c.num_hidden_layers * (c.hidden_size + c.head_dim) + c.hidden_size
    layers = c.num_hidden_layers * attention + num_moe * moe + (c.num_hidden_layers - num_moe) * dense
    return layers + norms + embeddings
