"""Writes a target or a drafter as a checkpoint folder: ``config.json`` and ``model.safetensors``, as transformers and DeepSpec do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.config.parts import DecoderConfig, ModelConfig
from dspark_lab.errors import LabError
from dspark_lab.models.moe import Experts
from dspark_lab.models.shards import shard_of


def save_target(
    target: nn.Module, cfg: DecoderConfig, folder: str | Path, *, context_len: int, dtype: torch.dtype
) -> None:
    """``target`` of shape ``cfg`` into ``folder``, its tensors cast to ``dtype``. Raises `LabError` for a part of a model."""
    moe = cfg.num_experts > 0
    values = _shape(cfg, dtype, context_len) | {"architectures": [f"Qwen3{'Moe' if moe else ''}ForCausalLM"]}
    _write(target, values, folder, dtype)


def save_drafter(
    drafter: nn.Module, model: ModelConfig, folder: str | Path, *, dtype: torch.dtype, **notes: Any
) -> None:
    """``drafter`` of ``model.draft`` and ``model.drafter`` into ``folder``; ``notes`` are kept in ``config.json`` and never read.

    The keys are DeepSpec's, and two more where they differ from DSpark: ``drafter_kind`` and ``sample_from_anchor``.
    """
    d = model.drafter
    values = _shape(model.draft, dtype, model.context_len) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": d.block_size,
        "mask_token_id": d.mask_token_id,
        "target_layer_ids": list(d.target_layer_ids),
        "num_target_layers": model.target.num_hidden_layers,
        "markov_rank": d.markov_rank,
        "enable_confidence_head": d.enable_confidence_head,
    }
    if d.markov_rank:
        values["markov_head_type"] = d.markov_head
    if d.enable_confidence_head:
        values["confidence_head_with_markov"] = d.confidence_head_with_markov
    if d.drafter_kind != "dspark":
        values |= {"drafter_kind": d.drafter_kind, "architectures": [d.drafter_kind]}
    if not d.sample_from_anchor:
        values["sample_from_anchor"] = False
    _write(drafter, values | notes, folder, dtype)


def _shape(c: DecoderConfig, dtype: torch.dtype, context_len: int) -> dict[str, Any]:
    """The keys of a Qwen3 or Qwen3-MoE ``config.json``."""
    values = asdict(c)
    theta, experts = values.pop("rope_theta"), values.pop("num_experts")
    values |= {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": context_len,
        "mlp_only_layers": list(c.mlp_only_layers),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if experts:
        return values | {"num_experts": experts}
    for name in (
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
        "decoder_sparse_step",
    ):
        del values[name]
    return values


def _write(module: nn.Module, values: dict[str, Any], folder: str | Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous().clone() for name, t in _tensors(module)}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names as on disk: one tensor an expert and projection."""
    experts = {name: m for name, m in module.named_modules() if isinstance(m, Experts)}
    for name, tensor in module.named_parameters():
        if shard_of(tensor) is not None:
            raise LabError(f"{name} is one rank's part of a tensor; save a model that was built with tp_size=1.")
        prefix, _, last = name.rpartition(".")
        if prefix not in experts:
            yield name, tensor
            continue
        projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, part in zip(experts[prefix].expert_ids, tensor, strict=True):
            for projection, half in zip(projections, part.chunk(len(projections)), strict=True):
                yield f"{prefix}.{expert}.{projection}.weight", half
