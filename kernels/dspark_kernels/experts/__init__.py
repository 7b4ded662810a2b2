"""Experts: grouped SwiGLU over the experts of one rank and the weighted sum over k, for the few rows of a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.experts import reference

if TYPE_CHECKING:
    from dspark_kernels.experts.kernel import Tiles

__all__ = ["experts"]


def experts(
    x: Tensor,
    local_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    residual: Tensor | None = None,
    arrivals: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """``x`` [T, H], ``local_ids`` [T, k] (−1: not computed) and ``topk_weights`` [T, k] to [T, H]; see `reference.experts`.

    ``gate_up`` [E, 2I, H] and ``down`` [E, H, I] are contiguous and of the dtype of ``x``. Nothing waits for the device
    and no grid depends on values, so it can be captured in a CUDA graph. The same inputs give the same bits.
    ``arrivals`` [E] int32 are the kernels' own counters: zeros, and zeros again when they are done. Whoever calls often keeps
    them, one for each place that may run at the same time; where None they are made. ``tiles`` replaces the table's choice.
    Both are for Triton only.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check(x, local_ids, topk_weights, gate_up, down, residual)
    if arrivals is not None and (tuple(arrivals.shape) != gate_up.shape[:1] or arrivals.dtype != torch.int32):
        raise ValueError(f"arrivals {tuple(arrivals.shape)} {arrivals.dtype} must be [{gate_up.shape[0]}] int32.")
    if not on_triton(x, products=True):
        return reference.experts(x, local_ids, topk_weights, gate_up, down, residual=residual)
    from dspark_kernels.experts import kernel

    residual = None if residual is None else residual.contiguous()
    return kernel.experts(
        x.contiguous(),
        local_ids.contiguous(),
        topk_weights.contiguous(),
        gate_up,
        down,
        residual=residual,
        arrivals=arrivals,
        tiles=tiles,
    )


def _check(
    x: Tensor, local_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor | None
) -> None:
    if x.dim() != 2 or local_ids.dim() != 2 or local_ids.shape[0] != x.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and local_ids {tuple(local_ids.shape)} must be [T, H] and [T, k].")
    if topk_weights.shape != local_ids.shape:
        raise ValueError(f"topk_weights has the shape {tuple(topk_weights.shape)}, local_ids {tuple(local_ids.shape)}.")
    num_experts, width, inner = down.shape
    if width != x.shape[1] or tuple(gate_up.shape) != (num_experts, 2 * inner, width):
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be [E, 2I, H] and [E, H, I], H = {x.shape[1]}."
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"x, gate_up and down need one dtype, not {x.dtype}, {gate_up.dtype} and {down.dtype}.")
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("gate_up and down must be contiguous: copying them would cost more than the product.")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has the shape {tuple(residual.shape)}, x {tuple(x.shape)}.")
