"""Checkpoints on disk: ``config.json`` to a `LabConfig`, safetensors to weights. Every misfit is named in a `LabError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.config.kinds import is_int, shown
from dspark_lab.config.lab import LabConfig
from dspark_lab.config.parts import ONE_BY_ONE, DecoderConfig, DrafterConfig, EngineConfig, ModelConfig
from dspark_lab.config.shipped import folder_of
from dspark_lab.errors import LabError
from dspark_lab.models.config_json import ConfigJson, decoder_config, drafter_config, dtype_of, read_config
from dspark_lab.models.moe import Experts
from dspark_lab.models.shards import shard_of
from dspark_lab.models.tensor_files import TensorFiles


def load_pair(target_dir: str | Path, drafter_dir: str | Path, **toggles: Any) -> LabConfig:
    """The config of a target (transformers' Qwen3 or Qwen3-MoE) and its DSpark drafter (DeepSpec), with toggles changed.

    Reads the two ``config.json`` only. ``block_size`` may be shorter than the checkpoint's: fewer rows are drafted then. Raises
    `LabError` for a longer one, and for whatever this version does not run.
    """
    target, draft = read_config(target_dir), read_config(drafter_dir)
    drafter = drafter_config(draft)
    wanted = toggles.get("block_size", drafter.block_size)
    if not is_int(wanted) or not 1 <= wanted <= drafter.block_size:
        raise _no_block_size(wanted, draft.path, drafter.block_size)
    layers = draft.get("num_target_layers", int, target.get("num_hidden_layers", int))
    if layers != target.get("num_hidden_layers", int):
        raise LabError(
            f"num_target_layers={shown(layers)} in {draft.path} and num_hidden_layers={shown(target.get('num_hidden_layers', int))} in "
            f"{target.path} differ: the drafter belongs to another target."
        )
    context_len = context_len_of(target, toggles.pop("context_len", None))
    room = context_len - EngineConfig.prompt_len - drafter.block_size - 1
    dtype = toggles.pop("dtype", None)
    model = ModelConfig(
        target=decoder_config(target),
        draft=decoder_config(draft),
        drafter=drafter,
        weights="checkpoint",
        target_path=str(target_dir),
        drafter_path=str(drafter_dir),
        dtype=dtype_of(target) if dtype is None else dtype,
        context_len=context_len,
    )
    engine = EngineConfig(max_new_tokens=max(1, min(EngineConfig.max_new_tokens, room)))
    return LabConfig(preset="checkpoint", model=model, engine=engine).replace(**toggles)


def context_len_of(c: ConfigJson, wanted: Any) -> int:
    """The caller's, or the checkpoint's where that is None."""
    if wanted is None:
        wanted = c.get("max_position_embeddings", int)
        if wanted < 1:
            raise LabError(
                f"{c.path} has max_position_embeddings={shown(wanted)}, which is not a whole number of at least 1; "
                "give context_len."
            )
    elif not is_int(wanted) or wanted < 1:
        raise LabError(
            f"context_len={shown(wanted)} is not a whole number of at least 1; None takes max_position_embeddings of {c.path}."
        )
    return wanted


def check_shapes(cfg: LabConfig) -> None:
    """Raises `LabError` where ``cfg`` was changed away from the checkpoints it names, and where a size in a ``config.json`` is
    not that of the tensors beside it. Reads headers only and allocates nothing.
    """
    m = cfg.model
    target, draft = read_config(str(m.target_path)), read_config(str(m.drafter_path))
    for path, ours, theirs in (
        (target.path, m.target, decoder_config(target)),
        (draft.path, m.draft, decoder_config(draft)),
        (draft.path, m.drafter, drafter_config(draft)),
    ):
        for name, value in vars(theirs).items():
            if name == "block_size":
                if getattr(ours, name) > value:
                    raise _no_block_size(getattr(ours, name), path, value)
            elif getattr(ours, name) != value:
                raise LabError(f"{name}={getattr(ours, name)!r} is not the checkpoint's: {path} has {value!r}.")
    _check_sizes(target.path, _sizes(m.target, "model."))
    if m.drafter.drafter_kind != "lookup":  # which has no tensors
        reads = 2 if m.drafter.drafter_kind == "eagle3" else 1  # token and feature
        _check_sizes(draft.path, chain(_sizes(m.draft, "", reads=reads), _drafter_sizes(m.draft, m.drafter)))


def _no_block_size(value: object, path: Path, trained: int) -> LabError:
    return LabError(
        f"block_size={shown(value)} is not the drafter's: {path} was trained with block_size={trained}; leave block_size out, or "
        f"choose a shorter one of 1 to {trained}."
    )


Sizes = Iterator[tuple[str, tuple[tuple[str, int], ...]]]
"""Tensor names, each with what its dimensions are called in ``config.json`` and what they are."""


def _sizes(c: DecoderConfig, prefix: str, *, reads: int = 1) -> Sizes:
    """The tensors that tell every size of a stack of layers; a size stands alone before it is in a product.

    ``reads``: how many hidden states side by side attention reads.
    """
    width = ("hidden_size", c.hidden_size)
    read = width if reads == 1 else (f"{reads} · hidden_size", reads * c.hidden_size)
    yield f"{prefix}embed_tokens.weight", (("vocab_size", c.vocab_size), width)
    for i in range(c.num_hidden_layers):
        layer = f"{prefix}layers.{i}."
        yield f"{layer}self_attn.q_norm.weight", (("head_dim", c.head_dim),)
        for name, heads in (
            ("q_proj", "num_attention_heads"),
            ("k_proj", "num_key_value_heads"),
            ("v_proj", "num_key_value_heads"),
        ):
            rows = (f"{heads}={getattr(c, heads)} · head_dim", getattr(c, heads) * c.head_dim)
            yield f"{layer}self_attn.{name}.weight", (rows, read)
        if not c.is_moe_layer(i):
            yield f"{layer}mlp.gate_proj.weight", (("intermediate_size", c.intermediate_size), width)
            continue
        experts, inner = ("num_experts", c.num_experts), ("moe_intermediate_size", c.moe_intermediate_size)
        yield f"{layer}mlp.gate.weight", (experts, width)
        yield f"{layer}mlp.experts.0.down_proj.weight|{layer}mlp.experts.down_proj", (experts, width, inner)


def _drafter_sizes(c: DecoderConfig, d: DrafterConfig) -> Sizes:
    n, width = len(d.target_layer_ids), ("hidden_size", c.hidden_size)
    yield "fc.weight", (width, (f"{n} target_layer_ids · hidden_size", n * c.hidden_size))
    if d.markov_rank and d.drafter_kind not in ONE_BY_ONE:
        yield "markov_head.markov_w1.weight", (("vocab_size", c.vocab_size), ("markov_rank", d.markov_rank))


def _check_sizes(path: Path, sizes: Sizes) -> None:
    with ExitStack() as stack:
        files = TensorFiles(path.parent, stack)
        for names, dims in sizes:
            one, _, fused = names.partition("|")
            name = fused if fused in files.where else one
            if fused and name == one:
                dims = dims[1:]  # a tensor an expert
            found = files.shape(name, [size for _, size in dims])
            if len(found) != len(dims):
                continue  # said when it is read
            for (what, size), there in zip(dims, found, strict=True):
                if size != there:
                    raise LabError(
                        f"{path} has {what}={size}, and the tensor {name} beside it has shape {found}: {there} there; "
                        "correct config.json."
                    )


@torch.no_grad()
def load_weights(module: nn.Module, folder: str | Path) -> None:
    """Fills ``module`` from ``model.safetensors`` or its shards in ``folder``; only what the rank holds is read.

    Raises `LabError` naming a missing, unexpected or misshapen tensor, or a file that does not read.
    """
    with ExitStack() as stack:
        files = TensorFiles(folder_of(folder), stack)
        experts = {name: m for name, m in module.named_modules() if isinstance(m, Experts)}
        for name, tensor in module.named_parameters():
            owner = experts.get(name.rpartition(".")[0])
            if owner is None:
                files.copy(name, tensor, shard_of(tensor))
            else:
                _copy_experts(files, name, tensor, owner, _num_experts(module, name))
        files.refuse_left_over()


def _num_experts(module: nn.Module, name: str) -> int:
    return module.get_submodule(name.partition(".experts.")[0]).gate.weight.shape[0]  # pyright: ignore


def _copy_experts(files: TensorFiles, name: str, tensor: Tensor, owner: Experts, num_experts: int) -> None:
    """One stacked tensor from its fused form [E, .., ..] or from one tensor an expert and projection."""
    shard = shard_of(tensor)
    if name in files.where:
        files.copy_fused(name, tensor, owner.expert_ids, num_experts, shard)
        return
    shard = shard and replace(shard, blocks=1)
    prefix, _, last = name.rpartition(".")
    projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    for expert in range(num_experts):
        files.pending.difference_update(f"{prefix}.{expert}.{p}.weight" for p in projections)
    for part, expert in zip(tensor, owner.expert_ids, strict=True):
        for view, projection in zip(part.chunk(len(projections)), projections, strict=True):
            files.copy(f"{prefix}.{expert}.{projection}.weight", view, shard)
