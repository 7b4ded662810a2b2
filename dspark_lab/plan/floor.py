"""The least a decode step can take: bytes that it must read, over the device's read bandwidth. Pure arithmetic on shapes."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_lab.config import DecoderConfig, LabConfig
from dspark_lab.plan.memory import ITEM_BYTES

H200_READ_BYTES_PER_S = 4.41e12
"""Measured on one H200: the best of torch's sum, amax and copy over several GB (`dspark_kernels.timing.read_bandwidth`)."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes one round reads on one rank, by part; each weight once."""

    attention: int
    """Projections of target and drafter, and the drafter's context projection of committed rows."""
    experts: int
    """Experts really hit, or the dense MLPs."""
    heads: int
    """LM heads of target and drafter, the router's rows, `fc`."""
    markov: int
    """W2 once a draft token."""
    kv: int
    """Keys and values below ``context`` of both caches."""

    @property
    def total(self) -> int:
        return self.attention + self.experts + self.heads + self.markov + self.kv

    def floor_us(self, read_bytes_per_s: float = H200_READ_BYTES_PER_S) -> float:
        return 1e6 * self.total / read_bytes_per_s


def step_bytes(cfg: LabConfig, *, target_hits: list[float], draft_hits: list[float], context: float) -> StepBytes:
    """Bytes of one round of ``cfg``; without speculation, or with drafts looked up in the prompt, of the target's alone.

    A drafter that drafts one token after another reads its weights and its K/V γ times.

    ``target_hits`` and ``draft_hits``: experts with a row, a mean a forward for each MoE layer (as a run's ``ep`` reports
    them); ``context``: mean positions of a request.
    """
    m = cfg.model
    item, tp, moe_tp = ITEM_BYTES[m.dtype], cfg.parallel.tp_size, cfg.parallel.moe_tp
    vocab, hidden, d = m.target.vocab_size, m.target.hidden_size, m.drafter
    drafts = cfg.gamma > 0 and d.drafter_kind != "lookup"
    one_by_one = d.drafter_kind == "eagle3"
    stacks = ((m.target, target_hits, 1), (m.draft, draft_hits, cfg.gamma if one_by_one else 1))[: 2 if drafts else 1]
    heads = sum(n * (vocab * hidden // tp + c.num_moe_layers * c.num_experts * c.hidden_size) for c, _, n in stacks)
    heads += len(d.target_layer_ids) * hidden * hidden if drafts else 0
    kv = sum(n * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim for c, _, n in stacks) // tp
    attention = sum(n * _attention(c) for c, _, n in stacks)
    if drafts and one_by_one:  # its projections to queries, keys and values read token and feature
        attention += (
            cfg.gamma * hidden * m.draft.head_dim * (m.draft.num_attention_heads + 2 * m.draft.num_key_value_heads)
        )
    return StepBytes(
        attention=item * attention // tp,
        experts=round(item * sum(n * _experts(c, hits, tp, moe_tp) for c, hits, n in stacks)),
        heads=item * heads,
        markov=item * cfg.gamma * vocab * d.markov_rank // tp if drafts and not one_by_one else 0,
        kv=round(item * kv * context * cfg.engine.batch_size),
    )


def _attention(c: DecoderConfig) -> int:
    return c.num_hidden_layers * c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)


def _experts(c: DecoderConfig, hits: list[float], tp: int, moe_tp: int) -> float:
    moe = 3 * c.hidden_size * c.moe_intermediate_size / moe_tp * sum(hits)
    dense = 3 * c.hidden_size * c.intermediate_size / tp * (c.num_hidden_layers - c.num_moe_layers)
    return moe + dense
