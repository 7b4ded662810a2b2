"""`add_rms_norm` in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` [T, H], ``residual`` [T, H] or None, ``weight`` [H] to (normed, new residual), both [T, H] of ``x``'s dtype."""
    total = x if residual is None else x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total
