"""Random anchors of a training batch: where blocks start, which slots count, and who sees whom. B sequences of S, A anchors, γ slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Blocks of one batch."""

    positions: Tensor
    """[B, A] int64, rising; 0 where there are fewer candidates than anchors."""
    kept: Tensor
    """[B, A] bool: whether the anchor is one."""
    mask: Tensor
    """[B, A, γ] bool: whether slot k, the token at anchor + k, counts; true on a prefix of each block."""


def draw_anchors(loss_mask: Tensor, num_anchors: int, block_size: int, noise: Tensor) -> Anchors:
    """Up to ``num_anchors`` positions a sequence, uniform without replacement: the smallest ``noise`` [B, S − 1] of candidates.

    p is a candidate if ``loss_mask`` [B, S] holds at p and at p + 1; slot k counts if it holds at p + 1 .. p + k.
    """
    b, s = loss_mask.shape
    candidate = loss_mask[:, :-1] & loss_mask[:, 1:]
    scores = torch.where(candidate, noise[:, : s - 1], 2.0)
    num = min(num_anchors, s - 1)
    found = scores.topk(num, dim=1, largest=False)
    kept = found.values < 2.0
    positions = torch.where(kept, found.indices, s).sort(dim=1).values
    kept = positions < s
    positions = torch.where(kept, positions, 0)
    labels = label_positions(positions, block_size)
    inside = labels < s
    counts = loss_mask.gather(1, labels.clamp(max=s - 1).flatten(1)).view(b, num, block_size)
    mask = (inside & counts & kept[..., None]).to(torch.int32).cumprod(dim=-1).bool()
    return Anchors(positions=positions, kept=kept, mask=mask)


def label_positions(positions: Tensor, block_size: int) -> Tensor:
    """[B, A, γ]: where the tokens stand that the slots predict, anchor + 1 .. anchor + γ."""
    return positions[..., None] + torch.arange(1, block_size + 1, device=positions.device)


def block_mask(anchors: Anchors, seq_len: int, width: int) -> Tensor:
    """[B, 1, A·W, S + A·W] bool: a row of a block sees the context before its anchor and the whole own block of ``width`` rows.

    Rows of an anchor that is none see their own block only, which keeps softmax finite; they do not count.
    """
    a, device = anchors.positions.shape[1], anchors.positions.device
    before = torch.arange(seq_len, device=device) < anchors.positions[..., None]
    context = (before & anchors.kept[..., None]).repeat_interleave(width, dim=1)
    block = torch.arange(a, device=device).repeat_interleave(width)
    own = (block[:, None] == block).expand(context.shape[0], -1, -1)
    return torch.cat((context, own), dim=-1)[:, None]
