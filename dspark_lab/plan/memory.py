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
    weights = _decoder_params(m.target, p) + _drafter_params(cfg, vocab)
    batch_size = -(-e.batch_size // p.attn_dp)  # of the fullest attention replica
    slots = batch_size + 1
    stacks = (m.target,) if d.drafter_kind == "lookup" else (m.target, m.draft)
    kv_rows = sum(c.num_hidden_layers * (c.num_key_value_heads // p.tp_size) * c.head_dim for c in stacks)
    # What other kinds keep of a position: its token as int64; its feature, whole on each rank.
    own = {"lookup": 8, "eagle3": m.draft.hidden_size * item}
    bucket = min((b for b in e.buckets if b >= batch_size), default=batch_size)
    rows = bucket * (gamma + 1)
    gathered = 2 * bucket * m.context_len * (m.target.num_key_value_heads // p.tp_size) * m.target.head_dim * item
    return MemoryPlan(
        weights_bytes=weights * item,
        cache_bytes=(2 * kv_rows * item + own.get(d.drafter_kind, 0)) * slots * m.context_len,
        logits_bytes=3 * 4 * rows * vocab + 3 * gathered,
    )


def _drafter_params(cfg: LabConfig, vocab: int) -> int:
    """``vocab``: this rank's part of the vocabulary."""
    c, d, p = cfg.model.draft, cfg.model.drafter, cfg.parallel
    if d.drafter_kind == "lookup":
        return 0
    params = _decoder_params(c, p) + len(d.target_layer_ids) * cfg.model.target.hidden_size * c.hidden_size  # and `fc`
    if d.drafter_kind == "eagle3":  # queries, keys and values of token and feature
        return params + c.hidden_size * (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim // p.tp_size
    return params + (c.vocab_size + vocab) * d.markov_rank  # W1 whole, W2 cut


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
