"""Named experiments to start from. A preset is only values: no code branches on its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspark_lab.config.lab import LabConfig
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, EngineConfig, ModelConfig, ParallelConfig
from dspark_lab.config.shipped import DRAFTERS, PREFIX, TARGET
from dspark_lab.errors import unknown


def tiny() -> LabConfig:
    """Runs on a CPU in seconds: MoE, 8 experts, top-2, γ 5. Synthetic weights: a bigram target, and a drafter that knows most of it."""
    target = DecoderConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    draft = DecoderConfig(**{**target.__dict__, "num_hidden_layers": 1})
    drafter = DrafterConfig(block_size=5, target_layer_ids=(0, 1), mask_token_id=255, markov_rank=48)
    return LabConfig(
        preset="tiny",
        model=ModelConfig(
            target=target, draft=draft, drafter=drafter, weights="bigram", dtype="float32", context_len=1024
        ),
        engine=EngineConfig(batch_size=4, max_new_tokens=256),
    )


def shipped() -> LabConfig:
    """Runs on a CPU in seconds: the trained pair in ``data/models``, a byte-level MoE target and DSpark with the RNN head, γ 7.

    `lab.shipped` takes the other drafters.
    """
    target = DecoderConfig(
        vocab_size=256,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    )
    dense = {"num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}
    draft = DecoderConfig(**{**target.__dict__, **dense, "num_hidden_layers": 2})
    drafter = DrafterConfig(
        block_size=7, target_layer_ids=(1, 2, 4), mask_token_id=255, markov_rank=64, markov_head="rnn"
    )
    return LabConfig(
        preset="shipped",
        model=ModelConfig(
            target=target,
            draft=draft,
            drafter=drafter,
            weights="checkpoint",
            target_path=TARGET,
            drafter_path=f"{PREFIX}{DRAFTERS[0]}",
            context_len=1024,
        ),
        engine=EngineConfig(batch_size=4, text="mixed", prompt_len=128, max_new_tokens=256),
    )


def small() -> LabConfig:
    """For a GPU: 12 target and 3 draft MoE layers of hidden size 2048, random weights in bfloat16, simulated acceptance."""
    target = DecoderConfig(
        vocab_size=32_000,
        hidden_size=2048,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1024,
    )
    draft = DecoderConfig(**{**target.__dict__, "num_hidden_layers": 3})
    drafter = DrafterConfig(block_size=5, target_layer_ids=(1, 5, 9), mask_token_id=31_999, markov_rank=256)
    return LabConfig(
        preset="small",
        model=ModelConfig(
            target=target, draft=draft, drafter=drafter, weights="random", dtype="bfloat16", context_len=2048
        ),
        engine=EngineConfig(batch_size=1, prompt_len=1024, max_new_tokens=900, simulated_accept_length=4.7),
    )


def qwen3_30b_a3b() -> LabConfig:
    """Qwen3-30B-A3B's published shape (48 layers, 128 experts of 768, top-8) with a 5-layer dense drafter; random weights."""
    target = DecoderConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        rope_theta=1_000_000.0,
    )
    draft = DecoderConfig(
        **{
            **target.__dict__,
            "num_hidden_layers": 5,
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "moe_intermediate_size": 0,
        }
    )
    drafter = DrafterConfig(block_size=5, target_layer_ids=(1, 12, 23, 34, 45), mask_token_id=151_669, markov_rank=256)
    return LabConfig(
        preset="qwen3-30b-a3b",
        model=ModelConfig(
            target=target, draft=draft, drafter=drafter, weights="random", dtype="bfloat16", context_len=4096
        ),
        engine=EngineConfig(
            batch_size=1,
            prompt_len=1024,
            max_new_tokens=2048,
            simulated_accept_length=4.7,
            use_graph=True,
            overlap=True,
        ),
    )


def seed() -> LabConfig:
    """Shaped like the workload of sglang #34759: 16,384 tokens of context, 2,048 out, T=0, γ 5, TP2, EP1, a 3-layer MoE drafter.

    Not the real model: `SEED_DIFFERENCES` says how. Needs two GPUs.
    """
    target = DecoderConfig(**{**small().model.target.__dict__, "num_hidden_layers": 12})
    draft = DecoderConfig(**{**target.__dict__, "num_hidden_layers": 3})
    base = small()
    return LabConfig(
        preset="seed",
        model=ModelConfig(
            target=target,
            draft=draft,
            drafter=base.model.drafter,
            weights="random",
            dtype="bfloat16",
            context_len=16_384 + 2_048 + 64,
        ),
        parallel=ParallelConfig(tp_size=2),
        engine=EngineConfig(
            batch_size=1,
            prompt_len=16_384,
            max_new_tokens=2_048,
            simulated_accept_length=4.7,
            use_graph=True,
            overlap=True,
        ),
    )


SEED_DIFFERENCES = (
    "12 target layers of small's shape (hidden 2048, 64 experts of 1024, top-6) instead of DeepSeek-V4-Flash-0731",
    "random weights in bfloat16 and a simulated accept length of 4.7 instead of a trained pair",
    "full attention in every layer instead of a sliding window of 128 in the drafter and sparse attention in the target",
    "no scheduler, tokenizer or sampler beside the decode loop: host_work_us stands for them",
    "H200s instead of RTX PRO 6000 Blackwells",
)
"""How the preset ``seed`` differs from the workload it is shaped like."""

PRESETS: dict[str, Callable[[], LabConfig]] = {
    "shipped": shipped,
    "tiny": tiny,
    "small": small,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "seed": seed,
}


def preset(name: str, **toggles: Any) -> LabConfig:
    """The preset ``name`` (a key of `PRESETS`) with toggles changed. Raises `LabError` on unknown names."""
    if not isinstance(name, str) or name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]().replace(**toggles)
