"""Plain steps over the models, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dspark_lab.config.parts import DecoderConfig, DrafterConfig, ModelConfig
from dspark_lab.models.batch import ForwardBatch, ForwardMode


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def batch_of(ids: Tensor, starts: Tensor, slots: Tensor, *, block: bool = False, **fields) -> ForwardBatch:
    """Rows ``ids`` [B, Q] from positions ``starts`` [B]; causal, or seeing the whole block."""
    b, q = ids.shape
    positions = starts[:, None] + torch.arange(q)
    limits = (starts[:, None] + q).expand(b, q) if block else positions + 1
    values = {
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "batch_size": b,
        "num_tokens_per_req": q,
        "input_ids": ids.reshape(-1),
        "positions": positions.reshape(-1),
        "req_slots": slots,
        "key_limits": limits.reshape(-1),
        "max_keys": int(limits.max()),
        "num_token_non_padded_cpu": b * q,
    }
    return ForwardBatch(**{**values, **fields})


def decoder_config(**changes) -> DecoderConfig:
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    return DecoderConfig(**{**values, **changes})


def model_config(**changes) -> ModelConfig:
    target = decoder_config(**changes)
    drafter = DrafterConfig(block_size=4, target_layer_ids=(-1, 1), mask_token_id=63, markov_rank=8)
    return ModelConfig(target=target, draft=decoder_config(**changes), drafter=drafter, context_len=64)


@pytest.fixture
def plain() -> SimpleNamespace:
    return SimpleNamespace(batch_of=batch_of, decoder_config=decoder_config, model_config=model_config)
