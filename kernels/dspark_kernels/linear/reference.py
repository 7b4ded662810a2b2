"""Products of few rows with a weight, in slices of the sum, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slices(NamedTuple):
    """A product whose last step, adding up, is left to the kernel that reads it."""

    parts: Tensor
    """[S, T, N] float32: their sum over S is the product (of rows that still lack their scale, where `squares` is set)."""
    squares: Tensor | None
    """[S, T] float32: the sum over S is each row's sum of squares; None without a norm."""
    total: Tensor
    """[T, K] the rows before the norm: ``x`` + ``residual``, or ``x`` itself."""
    eps: float
    """Of the norm."""

    def sum(self) -> Tensor:
        """[T, N] in the dtype of `total`, rounded once."""
        y = self.parts.sum(dim=0)
        if self.squares is not None:
            y = y * torch.rsqrt(self.squares.sum(dim=0) / self.total.shape[1] + self.eps)[:, None]
        return y.to(self.total.dtype)


def sliced_linear(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Slices:
    """``x`` [T, K] · ``weight`` [N, K]ᵀ; with ``norm_weight`` [K] of the RMS norm of ``x`` + ``residual`` [T, K].

    The sum is rounded to the dtype of ``x``; a norm's scale joins when the slices are added up.
    """
    total = x if residual is None else x + residual
    if norm_weight is None:
        return Slices((total.float() @ weight.float().T)[None], None, total, eps)
    wide = total.float()
    parts = (wide * norm_weight.float()).to(x.dtype).float() @ weight.float().T
    return Slices(parts[None], (wide * wide).sum(dim=-1)[None], total, eps)
