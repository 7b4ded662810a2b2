"""What a router does with padded rows before it hands them on. Dispatchers drop them by their count under each policy."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_lab.ep.dispatch import real_rows


def consume(policy: str, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, k] with rows from ``count`` on as ``policy`` wants them; as they are where ``count`` is None.

    ``mask``: expert ids −1 (CUDA back-ends); ``zero``: weights 0 (HIP paths), which is no mask, since 0 · NaN is NaN;
    ``ignore``: left alone (NPU back-ends). Masking is what `Dispatcher.dispatch` does anyway, so it costs nothing here.
    """
    if count is None or policy in ("mask", "ignore"):
        return topk_ids, topk_weights
    return topk_ids, torch.where(real_rows(topk_ids.shape[0], count), topk_weights, 0.0)
