"""How many draft tokens are verified, and simulated acceptance. Acceptance itself: `dspark_kernels.accept`. B requests, γ drafts."""

from __future__ import annotations

import torch
from torch import Tensor


def proposal_lengths(
    confidence: Tensor | None, threshold: float, batch_size: int, block_size: int, device: torch.device
) -> Tensor:
    """[B] int64: drafts to verify, cut before the first confidence strictly below ``threshold``; 0 keeps whole blocks.

    ``confidence`` [B, γ] is the raw conditional survival of each draft (DeepSpec's threshold rule).
    """
    if threshold <= 0.0 or confidence is None:
        return torch.full((batch_size,), block_size, dtype=torch.int64, device=device)
    return (confidence >= threshold).to(torch.int64).cumprod(dim=1).sum(dim=1)


def simulated_accepts(accept_length: float, num_steps: int, batch_size: int, seed: int) -> Tensor:
    """[num_steps, B] int64 accepted drafts, drawn anew each step so that the mean of ``1 + accepted`` is ``accept_length``.

    Each value is floor or ceil of ``accept_length − 1``; within a step the requests share one stratified draw, so the mean
    over steps converges fast.
    """
    g = torch.Generator().manual_seed(seed)
    whole = int(accept_length - 1.0)
    frac = accept_length - 1.0 - whole
    u = (torch.rand(num_steps, 1, generator=g) + torch.arange(batch_size)[None] / batch_size) % 1.0
    return whole + (u < frac).to(torch.int64)
