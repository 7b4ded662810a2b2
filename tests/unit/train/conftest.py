"""A small target with its drafters, untrained, and a batch of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dspark_lab.config.parts import DecoderConfig, ModelConfig
from dspark_lab.models.decoder import Target
from dspark_lab.models.weights import init_random
from dspark_lab.train.shapes import drafter_model

TARGET = DecoderConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def target() -> Target:
    target = Target(TARGET)
    init_random(target, 3)
    return target.requires_grad_(False)


@pytest.fixture
def model():
    def of(**changes) -> ModelConfig:
        return drafter_model(TARGET, mask_token_id=47, context_len=64, **{"block_size": 4, "markov_rank": 8} | changes)

    return of
