"""Residual sum and RMS norm in one kernel."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.linear.reference import Slices
from dspark_kernels.norm import reference


def add_rms_norm(x: Tensor | Slices, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` [T, H], or a product in slices that is [T, H] once added up, (+ ``residual`` [T, H]) to (normed, new residual), both [T, H] of ``x``'s dtype.

    normed = total / rms(total) · weight in float32, rounded once; total = x + residual, rounded to ``x``'s dtype before the
    norm. Without a residual the new residual is ``x`` itself, not a copy (of slices: their sum). Triton on CUDA and in its interpreter,
    plain torch elsewhere.
    """
    if on_triton(x.parts if isinstance(x, Slices) else x):
        from dspark_kernels.norm import kernel

        return kernel.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x.sum() if isinstance(x, Slices) else x, residual, weight, eps)


__all__ = ["add_rms_norm"]
