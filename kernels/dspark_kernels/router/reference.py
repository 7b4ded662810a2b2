"""The router in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DROPPED = -1
"""The expert id of a row that nobody computes."""


def route(
    logits: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best ``k`` experts of each row and their weights.

    Args:
        logits: [T, E], any float.
        k: experts a row, at most E.
        renormalize: whether the k weights are made to sum to 1.
        count: int32, one element on the device: rows from there on are padding.
        physical: [C, E] int64 (or [E]): physical expert of copy c of each logical one; the mask comes after it, since −1 would
            index its last entry.
        num_copies: [E] int64: row t takes copy t mod that. None: there is one of each.

    Returns:
        ``topk_ids`` [T, k] int64, by falling weight, and ``topk_weights`` [T, k] float32. Padded rows hold −1 and 0.
        Softmax is in float32 over all E. Of experts with equal weight the lower logical id comes first (`torch.topk`
        promises no order there, so a sort takes its place).
    """
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    weights, ids = probs.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :k], ids[:, :k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if physical is not None:
        row = torch.arange(logits.shape[0], device=logits.device)[:, None]
        turn = 0 if num_copies is None else row % num_copies[ids]
        ids = physical.reshape(-1, logits.shape[1])[turn, ids]
    if count is not None:
        real = torch.arange(logits.shape[0], device=logits.device)[:, None] < count.reshape(1, 1)
        ids, weights = torch.where(real, ids, DROPPED), torch.where(real, weights, 0.0)
    return ids.contiguous(), weights.contiguous()


def gate_and_route(
    x: Tensor,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` of the logits ``x`` [T, H] · ``gate`` [E, H]ᵀ, which stay in float32: no rounding to the dtype of ``x``."""
    logits = x.float() @ gate.float().T
    return route(logits, k, renormalize=renormalize, count=count, physical=physical, num_copies=num_copies)


class NormedRoute(NamedTuple):
    """What `norm_gate_route` gives."""

    normed: Tensor
    """[T, H] rows after the norm: what the experts compute."""
    total: Tensor
    """[T, H] rows before it: the new residual."""
    topk_ids: Tensor
    """[T, k] int64."""
    topk_weights: Tensor
    """[T, k] float32."""


def norm_gate_route(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> NormedRoute:
    """`gate_and_route` of the RMS norm of ``x`` + ``residual`` [T, H], ``norm_weight`` [H].

    The sum is rounded to the dtype of ``x`` before it is normed.
    """
    total = x + residual
    normed = F.rms_norm(total, norm_weight.shape, norm_weight, eps)
    ids, weights = gate_and_route(
        normed, gate, k, renormalize=renormalize, count=count, physical=physical, num_copies=num_copies
    )
    return NormedRoute(normed, total, ids, weights)
