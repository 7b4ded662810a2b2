"""The parts of a `LabConfig`: the two models, the parallel layout, the engine. Plain values; the rules are in `rules`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dspark_lab.config.choices import Alloc, parse_alloc


def _freeze_lists(part: Any) -> None:
    """Lists become tuples: a config is hashable, and people write lists."""
    for f in fields(part):
        if isinstance(value := getattr(part, f.name), list):
            object.__setattr__(part, f.name, tuple(value))


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a stack of decoder layers, in the names of a Hugging Face Qwen3 / Qwen3-MoE ``config.json``."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        _freeze_lists(self)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has experts: not listed in `mlp_only_layers`, and on the sparse step."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def num_moe_layers(self) -> int:
        if not self.num_experts:
            return 0
        dense = sum((i + 1) % self.decoder_sparse_step == 0 for i in self._listed)
        return self.num_hidden_layers // self.decoder_sparse_step - dense

    @property
    def _listed(self) -> set[int]:
        return {i for i in self.mlp_only_layers if 0 <= i < self.num_hidden_layers}


ONE_BY_ONE = ("eagle3", "lookup")
"""Kinds of drafters that see the anchor alone: they have neither mask tokens nor DSpark's heads, whatever the config says of them."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What a DSpark drafter has beside its decoder layers (names of DeepSpec's ``config.json``)."""

    block_size: int
    """γ: draft tokens of a block."""
    target_layer_ids: tuple[int, ...]
    """Target layers whose raw outputs are the draft context; −1 is the embedding output."""
    mask_token_id: int
    markov_rank: int
    markov_head: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    drafter_kind: str = "dspark"
    """``dspark``, or a baseline: ``dflash`` (no heads), ``eagle3`` (autoregressive), ``lookup`` (no model)."""
    sample_from_anchor: bool = True
    """Whether row k of a block predicts the token at anchor + k, the anchor's own row the first (DeepSpec); else the block has a
    row more, and the anchor's row predicts nothing (the original DFlash, speculators)."""

    @property
    def query_len(self) -> int:
        """Rows of a draft block: γ, or γ + 1 where the anchor's row predicts nothing; 1 where one token follows another."""
        return 1 if self.drafter_kind in ONE_BY_ONE else self.block_size + (not self.sample_from_anchor)

    @property
    def has_confidence(self) -> bool:
        """Whether it says how sure it is of a draft."""
        return self.enable_confidence_head and self.drafter_kind not in ONE_BY_ONE

    def __post_init__(self) -> None:
        _freeze_lists(self)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Target, drafter and where their weights come from."""

    target: DecoderConfig
    draft: DecoderConfig
    drafter: DrafterConfig
    weights: str = "random"
    """``bigram``: a synthetic pair that agrees most of the time; ``random``; ``checkpoint``: read from the two paths."""
    target_path: str | None = None
    drafter_path: str | None = None
    dtype: str = "float32"
    context_len: int = 2048
    """Positions a slot of the KV cache holds."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Who holds what. World size = attn_dp·tp_size·replicas = moe_dp·ep_size·moe_tp."""

    ep_size: int = 1
    tp_size: int = 1
    attn_dp: int = 1
    moe_dp: int = 1
    placement: str = "contiguous"
    num_redundant_experts: int = 0
    """Copies of experts beyond one of each, in every MoE layer."""
    expert_load: str = "own"
    """What ``placement="balanced"`` spreads: ``own`` is counted over the first steps, before anything is measured; else a made load."""
    dispatcher: str = "all_reduce"
    """How rows reach their experts' ranks at ep_size above 1; a name of `ep.registry`."""
    capacity_factor: float = 1.0
    """Rows that a rank can send to one other in graphs, as a share of its padded rows: ``all_to_all`` only. 1 always suffices."""

    @property
    def world_size(self) -> int:
        return max(self.attn_dp * self.tp_size, self.moe_dp * self.ep_size)

    @property
    def replicas(self) -> int:
        """Copies of the attention weights' layout: world / (attn_dp·tp_size)."""
        return self.world_size // (self.attn_dp * self.tp_size)

    @property
    def rows_ranks(self) -> int:
        """Ranks that hold the same rows: world / attn_dp."""
        return self.world_size // self.attn_dp

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert: world / (moe_dp·ep_size)."""
        return self.world_size // (self.moe_dp * self.ep_size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One decode step: batch, the scalar, verification, host."""

    device: str = "auto"
    batch_size: int = 1
    alloc: str = "on_demand"
    mask_padding: bool = True
    padding_policy: str = "mask"
    """What the router does with padded rows where the mask is compiled in; dispatchers drop them under each."""
    speculate: bool = True
    """False: the target alone, one token a request and step; the drafter rests. What speculation is to be compared with."""
    temperature: float = 0.0
    """Of drafter and target alike; 0 is greedy."""
    top_k: int = 0
    """Keeps the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keeps the fewest of the likeliest tokens whose mass reaches p."""
    stop_token_ids: tuple[int, ...] = ()
    """A request ends behind the first of these that it commits."""
    verify: str = "static"
    """How many drafts are verified: all; those before the first confidence below a threshold; a budget by expected gain and cost."""
    confidence_threshold: float = 0.0
    layout: str = "padded"
    """Rows of the verify forward: whole blocks, or ``compact``: only what is verified, of all requests one behind the other."""
    sps_path: str | None = None
    """Step costs that ``verify="scheduled"`` reads, as `SpsProfile.save` writes them; None: nothing was measured, nothing is trimmed."""
    sts_path: str | None = None
    """Calibration of the confidences, as `StsTable.save` writes it; None: as the drafter gives them."""
    simulated_accept_length: float | None = None
    use_graph: bool = False
    overlap: bool = False
    host_work_us: float = 0.0
    text: str = "random"
    """What the prompts of a measured run are."""
    prompt_len: int = 16
    max_new_tokens: int = 256
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Batch sizes that a step is padded to."""

    def __post_init__(self) -> None:
        _freeze_lists(self)

    @property
    def how(self) -> Alloc:
        """Transfer and guard behind `alloc`."""
        return parse_alloc(self.alloc)
