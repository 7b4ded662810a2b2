"""``x[key]`` and ``x[key] = value`` spelt out in ATen operations, with the copies and waits that they have on a CUDA device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def get_item(x: Tensor, key: Any) -> Tensor:
    """``x[key]``."""
    view, indices = _applied(x, key)
    if indices:
        return _aten.index.Tensor(view, indices)
    return _aten.alias.default(view) if view is x else view


def set_item(x: Tensor, key: Any, value: Any) -> None:
    """``x[key] = value``. A number becomes a CPU tensor: copied where ``x[key]`` is a single element, filled in elsewhere."""
    view, indices = _applied(x, key)
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=x.dtype)
    if indices:
        _aten.index_put_.default(view, indices, value)
    elif value.shape == view.shape:
        _aten.copy_.default(view, value)
    elif value.dim() == 0 and value.device.type == "cpu":
        _aten.fill_.Scalar(view, value.item())
    else:
        while value.dim() > view.dim() and value.shape[0] == 1:
            value = value[0]
        _aten.copy_.default(view, value)


def _applied(x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """``x`` after ints, slices, None and ``...`` of a key, and the tensors left for advanced indexing by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        taken = sum(_dims(k) for k in keys if k is not Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.dim() - taken)
    dim, indices = 0, {}
    for k in keys:
        if k is None:
            x = _aten.unsqueeze.default(x, dim)
            dim += 1
        elif isinstance(k, slice):
            bounds = [_number(b) for b in (k.start, k.stop, k.step)]
            if bounds != [None] * 3:
                x = _aten.slice.Tensor(x, dim, bounds[0], bounds[1], 1 if bounds[2] is None else bounds[2])
            dim += 1
        elif isinstance(k, Tensor) and k.dim() == 0 and k.dtype not in (torch.bool, torch.uint8):
            x = _aten.select.int(x, dim, _number(k))  # the host reads the index
        elif isinstance(k, Tensor):
            indices[dim] = k
            dim += _dims(k)
        elif hasattr(k, "__index__") and not isinstance(k, bool):
            x = _aten.select.int(x, dim, k.__index__())
        else:
            indices[dim] = torch.tensor(k, device=x.device)
            dim += 1
    return x, [indices.get(d) for d in range(max(indices) + 1)] if indices else []


def _number(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(_aten._local_scalar_dense.default(value))
    return None if value is None else value.__index__()


def _dims(key: Any) -> int:
    """Dimensions that one part of a key takes."""
    if key is None:
        return 0
    return key.dim() if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) else 1
