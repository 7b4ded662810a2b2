"""Sampling: random numbers by name, a draft from its logits, and chain rejection sampling of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_kernels.accept.reference import Accepted
from dspark_kernels.backend import on_triton
from dspark_kernels.sampling import reference
from dspark_kernels.sampling.reference import ACCEPT, BONUS, DRAFT, SamplingRows

SORTED_ROWS, SORTED_IDS = 4, 65_536
"""Up to so many rows of more ids than that a top-k or top-p is faster by torch's sort than by the search (docs/benchmarks.md)."""


def uniforms(seed: int, requests: Tensor, anchors: Tensor, num_slots: int) -> Tensor:
    """[B, num_slots, 3] float64 within 0 to 1 by (``seed``, ``requests`` [B], ``anchors`` [B], slot): the same bits everywhere."""
    if on_triton(requests):
        from dspark_kernels.sampling import kernel

        return kernel.uniforms(seed, requests, anchors, num_slots)
    return reference.uniforms(seed, requests, anchors, num_slots)


def sample(logits: Tensor, rows: SamplingRows, noise: Tensor, probs: Tensor | None = None) -> Tensor:
    """A token [B] int64 of each row of ``logits`` [B, V] by ``noise`` [B] float64; what it was drawn from goes to ``probs``
    [B, V] float32. The reference sums in float64 and the kernels a tile in float32: a number at the border of two tokens may
    give either. Float64 logits go to the reference."""
    sorts = rows.cuts and len(logits) <= SORTED_ROWS and logits.shape[1] > SORTED_IDS
    if _fits(logits) and not sorts:
        from dspark_kernels.sampling import kernel

        return kernel.sample(logits, rows, noise, probs)
    return reference.sample(logits, rows, noise, probs)


def chain_accept_logits(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_logits: Tensor,
    rows: SamplingRows,
    lengths: Tensor,
    *,
    accept_noise: Tensor,
    bonus_noise: Tensor,
    row_of_place: Tensor | None = None,
) -> Accepted:
    """Chain rejection sampling of ``draft_tokens`` [B, γ] from ``draft_probs`` [B, γ, V] float32 against ``target_logits``
    [N, V]; see `reference.chain_accept_logits`."""
    accept = reference.chain_accept_logits
    if _fits(target_logits):
        from dspark_kernels.sampling import kernel

        accept = kernel.chain_accept_logits
    return accept(
        draft_tokens, draft_probs, target_logits, rows, lengths, accept_noise=accept_noise, bonus_noise=bonus_noise,
        row_of_place=row_of_place,
    )  # fmt: skip


def _fits(logits: Tensor) -> bool:
    return on_triton(logits) and logits.dtype != torch.float64


__all__ = ["ACCEPT", "BONUS", "DRAFT", "Accepted", "SamplingRows", "chain_accept_logits", "sample", "uniforms"]
