"""``config.json`` of a checkpoint to the parts of a `LabConfig`, each value checked as it is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_lab.config.choices import MARKOV_HEADS
from dspark_lab.config.kinds import check_fields, is_int, shown
from dspark_lab.config.parts import DecoderConfig, DrafterConfig
from dspark_lab.config.rules import check_decoder
from dspark_lab.config.shipped import folder_of
from dspark_lab.errors import LabError, unknown

MODEL_TYPES = ("qwen3", "qwen3_moe")


class ConfigJson:
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


def read_config(folder: str | Path) -> ConfigJson:
    if not isinstance(folder, str | Path):
        raise LabError(f"{shown(folder)} is no path; a checkpoint is a folder with config.json and model.safetensors.")
    folder = folder_of(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise LabError(f"{folder} is no folder; a checkpoint is a folder with config.json and model.safetensors.")
    if not path.is_file():
        raise LabError(f"{folder} has no config.json; a checkpoint is a folder with config.json and model.safetensors.")
    config = ConfigJson(path, read_json(path))
    _refuse_unsupported(config)
    return config


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise LabError(f"{path} is not readable JSON: {e}") from None
    if not isinstance(values, dict):
        raise LabError(f"{path} holds a {type(values).__name__} and must hold an object.")
    return values


def _refuse_unsupported(c: ConfigJson) -> None:
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


def decoder_config(c: ConfigJson) -> DecoderConfig:
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
        rope_theta=ConfigJson(c.path, {**c.values, **rope}).get("rope_theta", float, 10_000.0),
        tie_word_embeddings=c.get("tie_word_embeddings", bool, False),
        attention_bias=c.get("attention_bias", bool, False),
        **experts,
    )
    c.named(lambda: check_decoder(decoder))
    return decoder


def drafter_config(c: ConfigJson) -> DrafterConfig:
    rank = c.get("markov_rank", int, 0)
    head = c.get("markov_head_type", str, "vanilla") if rank else "none"
    if head not in MARKOV_HEADS:
        raise c.unsupported("markov_head_type", head, f"{', '.join(MARKOV_HEADS[1:])}, or markov_rank 0")
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
        drafter_kind=c.get("drafter_kind", str, "dspark"),
        sample_from_anchor=c.get("sample_from_anchor", bool, True),
    )
    c.named(lambda: check_fields(drafter))
    return drafter


def dtype_of(c: ConfigJson) -> str:
    name = str(c.get("dtype", str, "float32", other="torch_dtype")).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise unknown(f"{c.path}: dtype", name, ("float32", "bfloat16"))
    return name
