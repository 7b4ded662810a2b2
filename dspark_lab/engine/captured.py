"""What a captured graph is made of: its key, its static inputs, the checks of a replay; and helpers on their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark_lab.errors import LabError

SCALAR = "num_token_non_padded"


@dataclass(frozen=True, kw_only=True)
class GraphKey:
    """All that a captured geometry depends on."""

    tokens: int
    slots: int
    width: int
    """Tokens a slot: ``tokens = slots · width``."""


@dataclass(frozen=True, kw_only=True)
class StaticInput:
    """A buffer that graphs read: rows of the largest bucket, and what padded rows hold."""

    buffer: Tensor
    """[max_slots · rows, …]."""
    pad: float | int | None = 0
    """Value of padded rows; None leaves what is there (legal only where nothing of it can reach a real row)."""
    rows: int = 1
    """Rows a slot."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What each replay verifies; off in measured runs, on in tests."""

    addresses: bool = False
    """Watched tensors are where they were at capture."""
    poison: bool = False
    """Before inputs are filled, every static row is poisoned: what the padding policy leaves out then shows."""
    eager: bool = False
    """The function, called eagerly on the same inputs and state, gives the same bits."""


@dataclass(kw_only=True)
class Captured:
    """One bucket's graph."""

    key: GraphKey
    replay: Callable[[], None]
    outputs: Any
    addresses: dict[str, int]
    capture_ms: float
    memory_bytes: int
    num_replays: int = 0
    destroy: Callable[[], None] = field(default=lambda: None)


def fill_slot(slot: Tensor, given: Tensor | int | None) -> None:
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.dtype != torch.int32:
            raise LabError(f"{SCALAR} has shape {tuple(given.shape)} and dtype {given.dtype}; it is one int32 element.")
        if given.data_ptr() != slot.data_ptr():
            slot.copy_(given.reshape(1), non_blocking=True)
    elif given is not None:
        slot.fill_(given)


def poison(rows: Tensor) -> None:
    rows.fill_(float("nan") if rows.is_floating_point() else torch.iinfo(rows.dtype).max)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def clones(value: Any) -> list[Tensor]:
    return [t.clone() for t in tensors(value)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
