"""Which draft tokens the target keeps. Pure functions on tensors; shapes: B requests, γ drafts, W = γ + 1 verified rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The outcome of one round."""

    num_accepted: Tensor
    """[B] int64, 0..γ: drafts kept."""
    bonus: Tensor
    """[B] int64: the target's own token after the last kept one; the next anchor."""
    out_tokens: Tensor
    """[B, W] int64: kept drafts, then the bonus; what lies behind it is not committed."""


def proposal_lengths(
    confidence: Tensor | None, threshold: float, batch_size: int, block_size: int, device: torch.device
) -> Tensor:
    """[B] int64: drafts to verify, cut before the first confidence strictly below ``threshold``; 0 keeps whole blocks.

    ``confidence`` [B, γ] is the raw conditional survival of each draft (DeepSpec's threshold rule).
    """
    if threshold <= 0.0 or confidence is None:
        return torch.full((batch_size,), block_size, dtype=torch.int64, device=device)
    return (confidence >= threshold).to(torch.int64).cumprod(dim=1).sum(dim=1)


def greedy_accept(
    draft_tokens: Tensor, target_tokens: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """Longest prefix of the drafts that equals the target's argmax, at most ``proposal_length``.

    ``draft_tokens`` [B, γ], ``target_tokens`` [B, W] (argmax after each verified row), ``proposal_length`` [B].
    ``forced`` [B] sets the number of accepted drafts instead (simulated acceptance), still capped by the proposal.
    """
    gamma = draft_tokens.shape[1]
    if forced is None:
        matches = (draft_tokens == target_tokens[:, :gamma]).to(torch.int64).cumprod(dim=1)
        num_accepted = matches.sum(dim=1)
    else:
        num_accepted = forced.clamp(max=gamma)
    num_accepted = torch.minimum(num_accepted, proposal_length)
    bonus = target_tokens.gather(1, num_accepted[:, None]).squeeze(1)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    column = torch.arange(gamma + 1, device=draft_tokens.device)[None]
    out_tokens = torch.where(column == num_accepted[:, None], bonus[:, None], padded)
    return Accepted(num_accepted=num_accepted, bonus=bonus, out_tokens=out_tokens)


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
