"""Greedy acceptance and argmax of rows in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """The outcome of one round; W = γ + 1."""

    num_accepted: Tensor
    """[B] int64, 0..γ: drafts kept."""
    bonus: Tensor
    """[B] int64: the target's own token after the last kept one."""
    out_tokens: Tensor
    """[B, W] int64: kept drafts, then the bonus; what lies behind it is not committed."""


def argmax_rows(x: Tensor) -> Tensor:
    """``x`` [N, V] to [N] int64; the lowest index among equals."""
    return x.argmax(dim=-1)


def greedy_accept(
    draft_tokens: Tensor, target_tokens: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """``draft_tokens`` [B, γ], ``target_tokens`` [B, W], ``proposal_length`` [B], ``forced`` [B], all int64, to `Accepted`."""
    gamma = draft_tokens.shape[1]
    if forced is None:
        num_accepted = (draft_tokens == target_tokens[:, :gamma]).to(torch.int64).cumprod(dim=1).sum(dim=1)
    else:
        num_accepted = forced.clamp(max=gamma)
    num_accepted = torch.minimum(num_accepted, proposal_length)
    bonus = target_tokens.gather(1, num_accepted[:, None]).squeeze(1)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    column = torch.arange(gamma + 1, device=draft_tokens.device)[None]
    return Accepted(num_accepted, bonus, torch.where(column == num_accepted[:, None], bonus[:, None], padded))


def greedy_accept_logits(
    draft_tokens: Tensor, target_logits: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """`greedy_accept` of the argmax of ``target_logits`` [B·W, V]."""
    target_tokens = argmax_rows(target_logits).view(draft_tokens.shape[0], -1)
    return greedy_accept(draft_tokens, target_tokens, proposal_length, forced=forced)
