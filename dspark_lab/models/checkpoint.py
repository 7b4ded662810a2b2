"""Checkpoints on disk: ``config.json`` to a `LabConfig`, safetensors to weights. Every misfit is named in a `LabError`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.config.kinds import check_fields, is_int, shown
from dspark_lab.config.lab import LabConfig
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, EngineConfig, ModelConfig
from dspark_lab.config.rules import check_decoder
from dspark_lab.errors import LabError, unknown
from dspark_lab.models.moe import Experts
from dspark_lab.models.shards import Shard, shard_of

MODEL_TYPES = ("qwen3", "qwen3_moe")


def load_pair(target_dir: str | Path, drafter_dir: str | Path, **toggles: Any) -> LabConfig:
    """The config of a target (transformers' Qwen3 or Qwen3-MoE) and its DSpark drafter (DeepSpec), with toggles changed.

    Reads the two ``config.json`` only. Raises `LabError` for whatever this version does not run, and for a ``block_size``
    that is not the checkpoint's.
    """
    target, draft = _read_config(target_dir), _read_config(drafter_dir)
    drafter = _drafter_config(draft)
    wanted = toggles.get("block_size", drafter.block_size)
    if wanted != drafter.block_size:
        raise LabError(
            f"block_size={shown(wanted)} is not the drafter's: {draft.path} was trained with block_size={drafter.block_size}; "
            "leave block_size out."
        )
    layers = draft.get("num_target_layers", int, target.get("num_hidden_layers", int))
    if layers != target.get("num_hidden_layers", int):
        raise LabError(
            f"num_target_layers={shown(layers)} in {draft.path} and num_hidden_layers={shown(target.get('num_hidden_layers', int))} in "
            f"{target.path} differ: the drafter belongs to another target."
        )
    context_len = _context_len(target, toggles.pop("context_len", None))
    room = context_len - EngineConfig.prompt_len - drafter.block_size - 1
    dtype = toggles.pop("dtype", None)
    model = ModelConfig(
        target=_decoder_config(target),
        draft=_decoder_config(draft),
        drafter=drafter,
        weights="checkpoint",
        target_path=str(target_dir),
        drafter_path=str(drafter_dir),
        dtype=_dtype(target) if dtype is None else dtype,
        context_len=context_len,
    )
    engine = EngineConfig(max_new_tokens=max(1, min(EngineConfig.max_new_tokens, room)))
    return LabConfig(preset="checkpoint", model=model, engine=engine).replace(**toggles)


def _context_len(c: _Config, wanted: Any) -> int:
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
    target, draft = _read_config(str(m.target_path)), _read_config(str(m.drafter_path))
    for path, ours, theirs in (
        (target.path, m.target, _decoder_config(target)),
        (draft.path, m.draft, _decoder_config(draft)),
        (draft.path, m.drafter, _drafter_config(draft)),
    ):
        for name, value in vars(theirs).items():
            if getattr(ours, name) != value:
                raise LabError(f"{name}={getattr(ours, name)!r} is not the checkpoint's: {path} has {value!r}.")
    _check_sizes(target.path, _sizes(m.target, "model."))
    _check_sizes(draft.path, chain(_sizes(m.draft, ""), _drafter_sizes(m.draft, m.drafter)))


Sizes = Iterator[tuple[str, tuple[tuple[str, int], ...]]]
"""Tensor names, each with what its dimensions are called in ``config.json`` and what they are."""


def _sizes(c: DecoderConfig, prefix: str) -> Sizes:
    """The tensors that tell every size of a stack of layers; a size stands alone before it is in a product."""
    width = ("hidden_size", c.hidden_size)
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
            yield f"{layer}self_attn.{name}.weight", (rows, width)
        if not c.is_moe_layer(i):
            yield f"{layer}mlp.gate_proj.weight", (("intermediate_size", c.intermediate_size), width)
            continue
        experts, inner = ("num_experts", c.num_experts), ("moe_intermediate_size", c.moe_intermediate_size)
        yield f"{layer}mlp.gate.weight", (experts, width)
        yield f"{layer}mlp.experts.0.down_proj.weight|{layer}mlp.experts.down_proj", (experts, width, inner)


def _drafter_sizes(c: DecoderConfig, d: DrafterConfig) -> Sizes:
    n, width = len(d.target_layer_ids), ("hidden_size", c.hidden_size)
    yield "fc.weight", (width, (f"{n} target_layer_ids · hidden_size", n * c.hidden_size))
    if d.markov_rank:
        yield "markov_head.markov_w1.weight", (("vocab_size", c.vocab_size), ("markov_rank", d.markov_rank))


def _check_sizes(path: Path, sizes: Sizes) -> None:
    with ExitStack() as stack:
        files = _Files(path.parent, stack)
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


class _Config:
    """A ``config.json`` whose values are checked as they are taken."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, name: str, kind: type, default: Any = None, *, other: str | None = None) -> Any:
        """``name`` (or its ``other`` name) as ``kind``; without a default the key is required."""
        value = self.values.get(name)
        if value is None and other is not None:
            value = self.values.get(other)
        if value is None:
            if default is None:
                raise LabError(f"{self.path} has no {name}{f' (nor {other})' if other else ''}; it is needed.")
            return default
        if kind is float and is_int(value):
            return value
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise LabError(f"{self.path} has {name}={shown(value)}, which is no {kind.__name__}.")
        return value

    def named(self, check: Callable[[], None]) -> None:
        """Runs ``check``; what it raises names this file."""
        try:
            check()
        except LabError as e:
            raise LabError(f"{self.path}: {e}") from None

    def unsupported(self, name: str, value: Any, legal: str) -> LabError:
        return LabError(f"{self.path} has {name}={shown(value)}, which this version does not run; it runs {legal}.")


def _read_config(folder: str | Path) -> _Config:
    if not isinstance(folder, str | Path):
        raise LabError(f"{shown(folder)} is no path; a checkpoint is a folder with config.json and model.safetensors.")
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise LabError(f"{folder} is no folder; a checkpoint is a folder with config.json and model.safetensors.")
    if not path.is_file():
        raise LabError(f"{folder} has no config.json; a checkpoint is a folder with config.json and model.safetensors.")
    config = _Config(path, _read_json(path))
    _refuse_unsupported(config)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise LabError(f"{path} is not readable JSON: {e}") from None
    if not isinstance(values, dict):
        raise LabError(f"{path} holds a {type(values).__name__} and must hold an object.")
    return values


def _refuse_unsupported(c: _Config) -> None:
    model_type = c.get("model_type", str)
    if model_type not in MODEL_TYPES:
        raise c.unsupported("model_type", model_type, " and ".join(MODEL_TYPES))
    if c.get("hidden_act", str, "silu") != "silu":
        raise c.unsupported("hidden_act", c.values["hidden_act"], "'silu'")
    scaling = c.values.get("rope_scaling")
    for name, rope in (("rope_scaling", scaling), ("rope_parameters", c.values.get("rope_parameters"))):
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise LabError(
                f"{c.path} has {name}={shown(rope)}, which is no object; it is one with rope_type 'default'."
            )
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise c.unsupported(name, rope, "rope_type 'default'")
    if c.values.get("use_sliding_window"):
        raise c.unsupported(
            "use_sliding_window", True, f"full attention (sliding_window={c.values.get('sliding_window')!r})"
        )
    sliding = [x for x in c.get("layer_types", list, []) if x != "full_attention"]
    if sliding:
        raise c.unsupported("layer_types", sliding[0], "'full_attention'")


def _decoder_config(c: _Config) -> DecoderConfig:
    """The shape in ``config.json``, under old and new key names; absent keys get the defaults of transformers."""
    heads, hidden = c.get("num_attention_heads", int), c.get("hidden_size", int)
    if heads < 1:
        raise LabError(f"{c.path}: num_attention_heads={shown(heads)} is not a whole number of at least 1.")
    moe = c.get("model_type", str) == "qwen3_moe"
    rope = c.values.get("rope_parameters") or {}
    experts: dict[str, Any] = {}
    if moe:
        experts = {
            "num_experts": c.get("num_local_experts", int, other="num_experts"),
            "num_experts_per_tok": c.get("num_experts_per_tok", int),
            "moe_intermediate_size": c.get("moe_intermediate_size", int),
            "norm_topk_prob": c.get("norm_topk_prob", bool, False),
            "mlp_only_layers": tuple(c.get("mlp_only_layers", list, [])),
            "decoder_sparse_step": c.get("decoder_sparse_step", int, 1),
        }
    decoder = DecoderConfig(
        vocab_size=c.get("vocab_size", int),
        hidden_size=hidden,
        num_hidden_layers=c.get("num_hidden_layers", int),
        num_attention_heads=heads,
        num_key_value_heads=c.get("num_key_value_heads", int, heads),
        head_dim=c.get("head_dim", int, hidden // heads if moe else 128),
        intermediate_size=c.get("intermediate_size", int),
        rms_norm_eps=c.get("rms_norm_eps", float, 1e-6),
        rope_theta=_Config(c.path, {**c.values, **rope}).get("rope_theta", float, 10_000.0),
        tie_word_embeddings=c.get("tie_word_embeddings", bool, False),
        attention_bias=c.get("attention_bias", bool, False),
        **experts,
    )
    c.named(lambda: check_decoder(decoder))
    return decoder


def _drafter_config(c: _Config) -> DrafterConfig:
    rank = c.get("markov_rank", int, 0)
    head = c.get("markov_head_type", str, "vanilla") if rank else "none"
    if head not in ("none", "vanilla"):
        raise c.unsupported("markov_head_type", head, "'vanilla', or markov_rank 0")
    if c.get("tie_word_embeddings", bool, False):
        raise c.unsupported("tie_word_embeddings", True, "drafters with an lm_head of their own")
    drafter = DrafterConfig(
        block_size=c.get("block_size", int),
        target_layer_ids=tuple(c.get("target_layer_ids", list)),
        mask_token_id=c.get("mask_token_id", int),
        markov_rank=rank,
        markov_head=head,
        enable_confidence_head=c.get("enable_confidence_head", bool, False),
        confidence_head_with_markov=c.get("confidence_head_with_markov", bool, False),
    )
    c.named(lambda: check_fields(drafter))
    return drafter


def _dtype(c: _Config) -> str:
    name = str(c.get("dtype", str, "float32", other="torch_dtype")).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise unknown(f"{c.path}: dtype", name, ("float32", "bfloat16"))
    return name


@torch.no_grad()
def load_weights(module: nn.Module, folder: str | Path) -> None:
    """Fills ``module`` from ``model.safetensors`` or its shards in ``folder``; only what the rank holds is read.

    Raises `LabError` naming a missing, unexpected or misshapen tensor, or a file that does not read.
    """
    with ExitStack() as stack:
        files = _Files(Path(folder), stack)
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


def _copy_experts(files: _Files, name: str, tensor: Tensor, owner: Experts, num_experts: int) -> None:
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


class _Files:
    """The tensors of a checkpoint folder by name, opened but not read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.where: dict[str, Any] = {}
        """Tensor name → open file."""
        for path in self._paths():
            file = self._open(path)
            self.where.update(dict.fromkeys(file.keys(), file))
        self.pending = set(self.where)

    def _paths(self) -> list[Path]:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.is_file():
            return [single]
        if not index.is_file():
            raise LabError(f"{self.folder} has neither model.safetensors nor model.safetensors.index.json.")
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise LabError(f"{index} has no weight_map from tensor to file.")
        paths = [self.folder / name for name in sorted(set(weight_map.values()))]
        for path in paths:
            if not path.is_file():
                raise LabError(f"{index} names {path.name}, and {self.folder} does not have it.")
        return paths

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self.stack.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as e:
            raise LabError(f"{path} does not read as safetensors (cut short or broken?): {e}") from None

    def copy(self, name: str, tensor: Tensor, shard: Shard | None = None) -> None:
        """The tensor ``name``, or the ``shard`` of it, into ``tensor``."""
        if shard is None:
            self._expect(name, list(tensor.shape))
            tensor.copy_(self._read(name, lambda file: file.get_tensor(name)))
            return
        self._expect(name, shard.whole_shape(tensor.shape))
        for here, there in shard.pieces():
            tensor[here].copy_(self._read(name, lambda file, i=there: file.get_slice(name)[i]))

    def copy_fused(
        self, name: str, tensor: Tensor, expert_ids: tuple[int, ...], num_experts: int, shard: Shard | None
    ) -> None:
        """The slices of ``expert_ids``, or the ``shard`` of each, out of a fused tensor [E, .., ..]."""
        whole = list(tensor.shape[1:]) if shard is None else shard.whole_shape(tensor.shape[1:])
        self._expect(name, [num_experts, *whole])
        pieces = [((slice(None),), (slice(None),))] if shard is None else list(shard.pieces())
        for part, expert in zip(tensor, expert_ids, strict=True):
            for here, there in pieces:
                part[here].copy_(self._read(name, lambda file, i=(expert, *there): file.get_slice(name)[i]))

    def shape(self, name: str, wanted: list[int]) -> list[int]:
        """The shape of the tensor ``name`` in its file; the error where it is missing says the one that is ``wanted``."""
        if name not in self.where:
            raise LabError(f"{self.folder} lacks the tensor {name} {wanted}.")
        return list(self.where[name].get_slice(name).get_shape())

    def _expect(self, name: str, shape: list[int]) -> None:
        self.pending.discard(name)
        found = self.shape(name, shape)
        if found != shape:
            raise LabError(f"{self.folder}: the tensor {name} has shape {found} and must have {shape}.")

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        try:
            value = read(self.where[name])
        except Exception as e:
            raise LabError(f"{self.folder}: the tensor {name} does not read: {e}") from None
        if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
            raise LabError(
                f"{self.folder}: the tensor {name} has dtype {value.dtype}; quantised checkpoints are not read."
            )
        return value

    def refuse_left_over(self) -> None:
        """Raises for tensors nobody asked for; an lm_head beside a tied embedding and stored RoPE tables are known copies."""
        tied = "lm_head.weight" in self.pending and "model.embed_tokens.weight" in self.where
        known = {n for n in self.pending if n.endswith("rotary_emb.inv_freq") or (tied and n == "lm_head.weight")}
        left = sorted(self.pending - known)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise LabError(
                f"{self.folder} has the unexpected tensor {left[0]}{more}: it does not belong to this model."
            )
