"""Named experiments to start from. A preset is only values: no code branches on its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspark_lab.config.lab import LabConfig
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, EngineConfig, ModelConfig
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


PRESETS: dict[str, Callable[[], LabConfig]] = {"tiny": tiny, "small": small}


def preset(name: str, **toggles: Any) -> LabConfig:
    """The preset ``name`` (``tiny`` or ``small``) with toggles changed. Raises `LabError` on unknown names."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]().replace(**toggles)
