"""`add_rms_norm` as one kernel: a program a row, which stays in registers between the sum and the norm."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait
from dspark_kernels.linear.kernel import add_slices
from dspark_kernels.linear.reference import Slices


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    num_rows,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < H
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait(CHAINED)
    dtype = normed_ptr.dtype.element_ty
    if NUM_SLICES > 0:
        x = add_slices(x_ptr, row * H + cols, inside, num_rows * H, NUM_SLICES).to(dtype)
        if not ADD:
            tl.store(total_ptr + row * H + cols, x, mask=inside)
    else:
        x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    total = x.to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
        # The sum is rounded first: torch norms what it has stored.
        rounded = (total + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * H + cols, rounded, mask=inside)
        total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / H + eps)
    tl.store(normed_ptr + row * H + cols, (total * scale * weight).to(x.dtype), mask=inside)


def add_rms_norm(x: Tensor | Slices, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`. Rows of ``x`` and ``residual`` may be strided; the last dimension is contiguous."""
    source = x.parts if isinstance(x, Slices) else x
    dtype = x.total.dtype if isinstance(x, Slices) else x.dtype
    num_slices = x.parts.shape[0] if isinstance(x, Slices) else 0
    rows, width = source.shape[-2:]
    if source.stride(-1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError(
            f"the last dimension must be contiguous, and x has strides {source.stride()}; call .contiguous()."
        )
    if weight.shape != (width,) or (residual is not None and tuple(residual.shape) != (rows, width)):
        raise ValueError(f"x {tuple(source.shape)}, residual and weight {tuple(weight.shape)} do not belong together.")
    normed = torch.empty(rows, width, dtype=dtype, device=source.device)
    total = x if residual is None and isinstance(x, Tensor) else torch.empty_like(normed)
    if rows == 0:
        return normed, total
    block = triton.next_power_of_2(width)
    _add_rms_norm[(rows,)](
        source,
        source if residual is None else residual,
        weight,
        normed,
        total,
        source.stride(-2),
        0 if residual is None else residual.stride(0),
        eps,
        rows,
        H=width,
        BLOCK_H=block,
        NUM_SLICES=num_slices,
        ADD=residual is not None,
        num_warps=max(1, min(16, block // 512)),
        **options(chains(source.device)),
    )
    return normed, total
