"""Small models for the engine's tests, made once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from dspark_lab.config import LabConfig, preset
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.weights import build

torch.set_num_threads(1)


@functools.lru_cache(maxsize=64)
def _models(cfg: LabConfig) -> tuple[Target, Drafter]:
    return build(cfg, "cpu")


@pytest.fixture(scope="session")
def models() -> Callable[[LabConfig], tuple[Target, Drafter]]:
    """Target and drafter of a config, built once a model part."""

    def get(cfg: LabConfig) -> tuple[Target, Drafter]:
        base = preset(
            "tiny",
            device="cpu",
            prompt_len=1,
            max_new_tokens=1,
            **{k: v for k, v in cfg.to_dict().items() if k in cfg_model_names(cfg)},
        )
        return _models(base)

    return get


def cfg_model_names(cfg: LabConfig) -> set[str]:
    """Names of the toggles that the weights depend on."""
    engine = {*preset("tiny").engine.__dataclass_fields__, *preset("tiny").parallel.__dataclass_fields__, "preset"}
    return set(cfg.to_dict()) - engine
