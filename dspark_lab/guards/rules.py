"""What an operation does to the host: which ATen calls make it wait for a CUDA device, and the way out of each.

The table follows what PyTorch's own watch (``torch.cuda.set_sync_debug_mode``) reports on a GPU; the GPU tests hold the two
against each other. Beyond that watch it knows copies between the device and pageable memory, which it does not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEEP_ON_DEVICE = "keep the value on the device, or copy it to pinned memory with non_blocking=True and read it a step later behind an event"
TO_DEVICE = (
    "fill a persistent device buffer in place (buffer.fill_(n)), copy from a ring of pinned memory with non_blocking=True,"
    " or build it only where something reads it (guard by the predicate)"
)
FIXED_SIZE = (
    "a size that the host knows: torch.where, masked_fill, index by a padded list, torch.nonzero_static(size=…)"
)


class Effect(NamedTuple):
    """What a call does: ``kind`` as in ``Finding``, one phrase, and the way out."""

    kind: str
    what: str
    way_out: str


DATA_TO_DEVICE = Effect("sync", "pageable host-to-device copy and stream synchronise", TO_DEVICE)
_EQUAL = Effect("sync", "compares on the device and waits for the answer", KEEP_ON_DEVICE)
_NUMBER = Effect("sync", "copies one number to the host and waits for the stream", KEEP_ON_DEVICE)
_SIZE = "its size depends on the data: the host waits for the stream to learn it"
_BY_NAME: dict[str, Effect] = {
    "aten::_local_scalar_dense": _NUMBER,
    "aten::nonzero": Effect("sync", _SIZE, FIXED_SIZE),
    "aten::masked_select": Effect("sync", _SIZE, FIXED_SIZE),
    "aten::_unique": Effect("sync", _SIZE, FIXED_SIZE),
    "aten::_unique2": Effect("sync", _SIZE, FIXED_SIZE),
    "aten::unique_dim": Effect("sync", _SIZE, FIXED_SIZE),
    "aten::unique_consecutive": Effect("sync", _SIZE, FIXED_SIZE),
    "aten::bincount": Effect("sync", _SIZE, "torch.zeros(n).scatter_add_ with a size that the host knows"),
}
_MASKS = (torch.bool, torch.uint8)


def on_cuda(value: Any) -> bool:
    """Whether ``value`` is a tensor on a CUDA device, a fake one included."""
    return isinstance(value, Tensor) and value.device.type == "cuda"


def effect_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect | None:
    """What an ATen operation about to run does to the host; None where it does not wait."""
    name = func._schema.name
    first = args[0] if args else None
    if name == "aten::_to_copy":
        return _converted(args[0], kwargs)
    if name in ("aten::copy_", "aten::copy"):
        return transfer(args[1], args[0].device, _given(args, kwargs, 2, "non_blocking"), into=args[0])
    if name == "aten::_foreach_copy_":
        pairs = zip(args[0], args[1], strict=True)
        effects = (transfer(s, d.device, _given(args, kwargs, 2, "non_blocking"), into=d) for d, s in pairs)
        return next((e for e in effects if e), None)
    if not on_cuda(first):
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name == "aten::equal":
        return None if _known_equal_or_not(args[0], args[1]) else _EQUAL
    if name == "aten::repeat_interleave" and func._overloadname == "Tensor":
        known = _given(args, kwargs, 1, "output_size") is not None
        return None if known else Effect("sync", _SIZE, "pass output_size=, which the host knows")
    if name == "aten::index":
        return _indexed(args[1])
    if name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        return _index_put(args[0], args[1], args[2])
    return None


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _converted(source: Tensor, kwargs: Mapping[str, Any]) -> Effect | None:
    device = kwargs.get("device")
    if device is None:
        return None
    # a non-blocking copy to the host lands in pinned memory that PyTorch allocates for it
    return transfer(source, torch.device(device), bool(kwargs.get("non_blocking")), into=None)


def transfer(source: Tensor, device: torch.device, non_blocking: Any, *, into: Tensor | None) -> Effect | None:
    """What a copy of ``source`` to ``device`` does to the host."""
    ends = (source.device.type, device.type)
    if "cuda" not in ends or ends == ("cuda", "cuda") or "meta" in ends or not source.numel():
        return None
    if ends == ("cpu", "cuda"):
        pinned = source.is_pinned()
        if not non_blocking:
            how = "host-to-device copy from pinned memory" if pinned else "pageable host-to-device copy"
            return Effect("sync", f"{how} and stream synchronise", TO_DEVICE)
        if pinned:
            return None
        what = "copy from pageable memory, which the driver stages before the call returns"
        return Effect("pageable_staging", what, "copy from a ring of pinned memory")
    if not non_blocking:
        return Effect("sync", "device-to-host copy and stream synchronise", KEEP_ON_DEVICE)
    if into is None or into.is_pinned():
        return None
    return Effect("sync", "copy into pageable memory, which holds the host until the stream is done", KEEP_ON_DEVICE)


def _known_equal_or_not(a: Tensor, b: Tensor) -> bool:
    """Whether the host can tell without the values: one and the same tensor, other shapes, nothing in them."""
    return a is b or a.shape != b.shape or not a.numel()


def _indexed(indices: Sequence[Any]) -> Effect | None:
    given = [i for i in indices if i is not None]
    if any(i.dtype in _MASKS for i in given):
        return Effect("sync", f"boolean mask: {_SIZE}", FIXED_SIZE)
    if any(not on_cuda(i) for i in given):
        return Effect("sync", "index on the CPU: pageable copy and stream synchronise", "keep the index on the device")
    return None


def _index_put(target: Tensor, indices: Sequence[Any], value: Tensor) -> Effect | None:
    given = [i for i in indices if i is not None]
    number = not on_cuda(value) and value.numel() == 1
    if number and len(given) == 1 and given[0].dtype in _MASKS and on_cuda(given[0]):
        return None  # becomes a masked_fill
    effect = _indexed(indices)
    if effect is None and not on_cuda(value):
        return Effect(
            "sync", "value on the CPU: pageable copy and stream synchronise", "make the value a device tensor once"
        )
    return effect
