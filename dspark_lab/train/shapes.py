"""From a target to a drafter: the shape of one that goes with it, and its weights before the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dspark_lab.config.choices import DRAFTERS, MARKOV_HEADS
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, ModelConfig
from dspark_lab.errors import LabError, unknown
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.train.language import init_weights

BACKBONES = ("dense", "moe")


def drafter_model(
    target: DecoderConfig,
    *,
    mask_token_id: int,
    context_len: int,
    drafter: str = "dspark",
    block_size: int = 7,
    markov_head: str = "vanilla",
    markov_rank: int = 64,
    num_layers: int = 2,
    backbone: str = "dense",
    intermediate_size: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    num_target_layers_read: int = 3,
    confidence: bool | None = None,
) -> ModelConfig:
    """The config of a drafter for ``target``: its attention, ``num_layers`` layers, and what ``drafter`` names beside them.

    ``markov_head="none"`` is rank 0. The baselines have neither head; ``confidence`` says otherwise. ``eagle3`` has one layer.
    ``intermediate_size``: of the dense backbone, or of all experts of ``moe`` (8, top-2) together; by default twice the hidden
    size, and for the one layer of ``eagle3`` twice that. Raises `LabError` on unknown names and sizes that are none.
    """
    for what, value, legal in (
        ("drafter", drafter, [d for d in DRAFTERS if d != "lookup"]),
        ("markov_head", markov_head, MARKOV_HEADS),
        ("backbone", backbone, BACKBONES),
    ):
        if value not in legal:
            raise unknown(what, value, legal)
    for what, value, least in (
        ("block_size", block_size, 1),
        ("markov_rank", markov_rank, 0),
        ("num_layers", num_layers, 1),
        ("intermediate_size", 1 if intermediate_size is None else intermediate_size, 1),
        ("num_target_layers_read", num_target_layers_read, 1),
    ):
        if not is_int(value) or value < least:
            raise LabError(f"{what}={shown(value)} is not a whole number of at least {least}.")
    if confidence is not None and not isinstance(confidence, bool):
        raise LabError(f"confidence={shown(confidence)} is not True or False, or None for what the drafter comes with.")
    plain = drafter != "dspark" or markov_head == "none"
    eagle = drafter == "eagle3"
    width = intermediate_size or target.hidden_size * (4 if eagle else 2)
    shape: dict[str, Any] = {
        "num_hidden_layers": 1 if eagle else num_layers,
        "tie_word_embeddings": False,
        "mlp_only_layers": (),
        "decoder_sparse_step": 1,
    }
    if backbone == "moe":
        shape |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": max(8, width // 6 // 8 * 8),
            "intermediate_size": width,
        }
    else:
        shape |= {"num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0, "intermediate_size": width}
    with_confidence = drafter == "dspark" if confidence is None else confidence
    return ModelConfig(
        target=target,
        draft=replace(target, **shape),
        drafter=DrafterConfig(
            block_size=block_size,
            target_layer_ids=target_layer_ids or spread_layers(target.num_hidden_layers, num_target_layers_read),
            mask_token_id=mask_token_id,
            markov_rank=0 if plain else markov_rank,
            markov_head="none" if plain else markov_head,
            enable_confidence_head=with_confidence,
            confidence_head_with_markov=with_confidence and not plain,
            drafter_kind=drafter,
            sample_from_anchor=drafter != "dflash",
        ),
        context_len=context_len,
    )


def spread_layers(num_layers: int, num: int) -> tuple[int, ...]:
    """``num`` layers of a target at even distances, from the second to the last but one; fewer where there are fewer."""
    first, last = min(1, num_layers - 1), max(num_layers - 2, 0)
    if num < 1:
        raise LabError(f"num_target_layers_read={num} is not a whole number of at least 1: a drafter reads some layer.")
    steps = max(num - 1, 1)
    return tuple(sorted({round(first + (last - first) * i / steps) for i in range(num)}))


def new_drafter(
    model: ModelConfig, target: Target, seed: int, *, device: torch.device | str, dtype: torch.dtype
) -> Drafter | EagleDrafter:
    """A drafter of ``model`` before its first step, with the target's own embedding and LM head."""
    kind = EagleDrafter if model.drafter.drafter_kind == "eagle3" else Drafter
    drafter = kind(model, device=device, dtype=dtype)
    init_weights(drafter, seed)
    head = target.model.embed_tokens if target.lm_head is None else target.lm_head
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        drafter.lm_head.weight.copy_(head.weight)
    return drafter
