"""Every field of a config part has the type of its annotation and a legal size, before any rule reads it."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, fields
from functools import cache
from types import NoneType
from typing import Any, TypeGuard, get_args, get_origin, get_type_hints

from dspark_lab.config import choices
from dspark_lab.errors import LabError, unknown

AT_LEAST: dict[str, int] = {
    "seed": 0,
    "batch_size": 1,
    "num_steps": 0,
    "num_anchors": 1,
    "block_size": 1,
    "ep_size": 1,
    "tp_size": 1,
    "attn_dp": 1,
    "moe_dp": 1,
    "num_redundant_experts": 0,
    "prompt_len": 1,
    "max_new_tokens": 1,
    "context_len": 1,
    "buckets": 1,
    "markov_rank": 0,
    "vocab_size": 2,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "intermediate_size": 1,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "decoder_sparse_step": 1,
    "top_k": 0,
    "stop_token_ids": 0,
}
"""Smallest legal value of the whole numbers that have one, by field."""

LEGAL: dict[str, tuple[str, ...]] = {
    "device": choices.DEVICES,
    "verify": choices.VERIFY,
    "layout": choices.LAYOUTS,
    "text": choices.TEXTS,
    "dtype": choices.DTYPES,
    "weights": choices.WEIGHTS,
    "markov_head": choices.MARKOV_HEADS,
    "drafter_kind": choices.DRAFTERS,
    "placement": choices.PLACEMENTS,
    "expert_load": choices.EXPERT_LOADS,
    "padding_policy": choices.PADDING_POLICIES,
    "alloc": tuple(choices.ALLOCS),
}
"""Texts that are one of a few; `alloc` may also be ``"transfer:guard"``."""

_SIZELESS = (bool, str, NoneType)
_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text"}


def shown(value: Any) -> str:
    """``value`` for a message: one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python prints
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_int(value: Any) -> TypeGuard[int]:
    """A whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_fields(part: Any, prefix: str = "") -> None:
    """Raises `LabError` for the first field of the dataclass ``part`` that is not what its annotation says, or too small.

    ``prefix`` goes before the names: ``target_`` makes them toggles.
    """
    for f, kinds in _kinds_of(type(part)):
        value = getattr(part, f.name)
        if (type(value) in _SIZELESS and type(value) in kinds) or any(_is(value, kind, f.name) for kind in kinds):
            continue
        if f.name in LEGAL:
            raise unknown(prefix + f.name, value, LEGAL[f.name])
        legal = " or ".join(_words(kind, f.name) for kind in kinds)
        raise LabError(f"{prefix}{f.name}={shown(value)} is not {legal}{_way_out(f)}.")


@cache
def _kinds_of(part: type) -> tuple[tuple[Field[Any], tuple[Any, ...]], ...]:
    """The fields of the dataclass ``part``, each with the kinds that its annotation allows; every config asks for them."""
    hints = {name: (h,) if get_origin(h) in (None, tuple) else get_args(h) for name, h in get_type_hints(part).items()}
    return tuple((f, hints[f.name]) for f in fields(part))


def _is(value: Any, kind: Any, name: str) -> bool:
    if kind is int:
        return is_int(value) and value >= AT_LEAST.get(name, value)
    if kind is float:
        return (isinstance(value, float) or is_int(value)) and _finite(value)
    if isinstance(kind, type):
        return isinstance(value, kind)
    return isinstance(value, tuple) and all(_is(v, get_args(kind)[0], name) for v in value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _words(kind: Any, name: str) -> str:
    least = f" of at least {AT_LEAST[name]}" if name in AT_LEAST else ""
    if get_origin(kind) is tuple:
        return f"a list or tuple of whole numbers{least and ', each' + least.removeprefix(' of')}"
    if kind is NoneType:
        return "None"
    return f"{_WORDS.get(kind, f'a {kind.__name__}')}{least if kind is int else ''}"


def _way_out(f: Field[Any]) -> str:
    if f.default is MISSING:
        return ""
    value = list(f.default) if isinstance(f.default, tuple) else f.default
    return f"; the default is {value!r}"
