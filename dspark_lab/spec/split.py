"""A budget of drafts shared out on the device, without a synchronise: the twin of `plan.schedule.split` on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_lab.plan.schedule import MIN_SURVIVAL


def split_budget(
    confidence: Tensor, budget: Tensor | int, *, is_real: Tensor | None = None, least: float = MIN_SURVIVAL
) -> Tensor:
    """[B] int64 drafts to verify, 0..γ: the ``budget`` likeliest of ``confidence`` [B, γ] by Π_{i≤j} c_i, from ``least`` on.

    Among equals by position, then by row. ``budget``: a number, or one element on the device. ``is_real`` [B] bool: padded
    rows get 0.
    """
    survivals = confidence.cumprod(dim=1)
    if is_real is not None:
        survivals = survivals * is_real[:, None]
    by_position = survivals.t().reshape(-1)  # a stable sort then keeps position before row
    order = by_position.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    admitted = (rank < budget) & (by_position >= least) & (by_position > 0)
    return admitted.view(confidence.shape[1], confidence.shape[0]).sum(dim=0)
