"""Linear: products of a decode step's few rows with a weight, whose bytes are the time; optionally behind sum and RMS norm."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.linear import reference
from dspark_kernels.linear.reference import Slices

__all__ = ["MAX_ROWS", "Slices", "sliced_linear"]

MAX_ROWS = 32
"""Rows up to which slices are worth it (`bench`); they are read again by who adds them up, so more rows cost more."""


def sliced_linear(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Slices:
    """``x`` [T, K] · ``weight`` [N, K]ᵀ in slices of K; see `reference.sliced_linear`.

    One program multiplies one block of columns in one slice of K, so that all of the weight is on its way at once, and
    where kernels are chained before the rows exist. Who reads the product adds the slices up.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, residual, norm_weight, weight)
    if not (weight.is_contiguous() and on_triton(x, products=True)):
        return reference.sliced_linear(x, weight, residual=residual, norm_weight=norm_weight, eps=eps)
    from dspark_kernels.linear import kernel

    return kernel.sliced_linear(x, weight, residual=residual, norm_weight=norm_weight, eps=eps)


def _check(x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} must be [T, K] and [N, K] "
            "of one dtype."
        )
    if norm_weight is not None and norm_weight.shape != x.shape[1:]:
        raise ValueError(f"norm_weight has the shape {tuple(norm_weight.shape)}, and x has rows of {x.shape[1]}.")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has the shape {tuple(residual.shape)}, x {tuple(x.shape)}.")
    if x.stride(1) != 1 or weight.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the last dimension of rows and weight must be contiguous; call .contiguous().")
