"""The few integers of a round, in plain torch: which rows a forward has, and what a verified block changes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_kernels.accept.reference import Accepted, greedy_accept


class Rows(NamedTuple):
    """The rows of one forward over B requests of W rows each, all int64."""

    input_ids: Tensor
    """[B·W]."""
    positions: Tensor
    """[B·W], from each request's length on."""
    key_limits: Tensor
    """[B·W]: a row sees cache positions below it."""
    req_slots: Tensor
    """[B] cache slots; the dummy slot where a request takes no part."""
    token_slots: Tensor
    """[B·W] the same by row."""


def block_rows(
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    drafts: Tensor | None,
    *,
    width: int,
    mask_token: int,
    dummy_slot: int,
) -> Rows:
    """Rows of a draft block (``drafts`` None: anchor and mask tokens, all see the whole block) or of a verification.

    ``anchors``, ``seq_lens``, ``slots``, ``limits`` [B]; ``drafts`` [B, γ] with ``width`` = γ + 1 gives anchor and drafts, each
    row seeing up to itself. A request takes part while its length is below its limit; else its rows are at position 0 of the
    dummy slot.
    """
    b = anchors.shape[0]
    column = torch.arange(width, device=anchors.device)
    takes_part = seq_lens < limits
    start = torch.where(takes_part, seq_lens, 0)
    req_slots = torch.where(takes_part, slots, dummy_slot)
    if drafts is None:
        tail = torch.full((b, width - 1), mask_token, dtype=torch.int64, device=anchors.device)
    else:
        tail = drafts
    positions = start[:, None] + column
    key_limits = (start[:, None] + width).expand(-1, width) if drafts is None else positions + 1
    return Rows(
        torch.cat([anchors[:, None], tail], dim=1).flatten(),
        positions.flatten(),
        key_limits.flatten(),
        req_slots,
        req_slots[:, None].expand(-1, width).reshape(-1).contiguous(),
    )


def accept_and_commit(
    drafts: Tensor,
    lengths: Tensor,
    target_tokens: Tensor,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    simulated: Tensor | None,
    num_rounds: Tensor,
    *,
    dummy_slot: int,
    results: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> Tensor:
    """Greedy acceptance of ``drafts`` [B, γ] (at most ``lengths`` [B]) against ``target_tokens`` [B, γ + 1]; the state moves on.

    Changes in place: ``anchors`` [B] (the bonus token) and ``seq_lens`` [B] of requests that take part, ``packed``
    [B, γ + 3] (tokens, how many were committed, how many drafts were verified) and ``num_rounds`` [1]. ``simulated`` [S, B']
    gives the accepted drafts of round ``num_rounds`` mod S instead. Entry ``num_rounds`` mod D of ``results`` [D, B, γ + 4] gets
    ``packed`` and the round's number; on a GPU it may be pinned host memory. ``stop_ids`` [S] int64: a block is committed up to
    and with the first of these, and its request takes no part any more (its limit becomes 0). Returns the cache slot of each verified row
    [B·(γ + 1)]: the request's for committed ones, else the dummy slot.
    """
    b = drafts.shape[0]
    forced = None if simulated is None else simulated.index_select(0, num_rounds % simulated.shape[0])[0, :b]
    accepted = greedy_accept(drafts, target_tokens, lengths, forced=forced)
    return commit(
        accepted, lengths, anchors, seq_lens, slots, limits, packed, num_rounds,
        dummy_slot=dummy_slot, results=results, stop_ids=stop_ids,
    )  # fmt: skip


def commit(
    accepted: Accepted,
    lengths: Tensor,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    num_rounds: Tensor,
    *,
    dummy_slot: int,
    results: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> Tensor:
    """The second half of `accept_and_commit`, of any way of acceptance: what was ``accepted`` of ``lengths`` [B] drafts."""
    takes_part = seq_lens < limits
    committed = torch.where(takes_part, accepted.num_accepted + 1, 0)
    column = torch.arange(accepted.out_tokens.shape[1], device=lengths.device)
    if stop_ids is not None:
        stops = (accepted.out_tokens[..., None] == stop_ids).any(dim=-1) & (column < committed[:, None])
        stopped = stops.any(dim=1)
        committed = torch.where(stopped, stops.to(torch.int64).argmax(dim=1) + 1, committed)
        limits.copy_(torch.where(stopped, 0, limits))
    context_slots = torch.where(column < committed[:, None], slots[:, None], dummy_slot)
    packed.copy_(torch.cat([accepted.out_tokens, committed[:, None], lengths[:, None]], dim=1))
    anchors.copy_(torch.where(takes_part, accepted.bonus, anchors))
    seq_lens.add_(committed)
    if results is not None:
        told = torch.cat([packed, num_rounds.expand(len(packed), 1)], dim=1)
        results.index_copy_(0, num_rounds % results.shape[0], told[None])
    num_rounds.add_(1)
    return context_slots.flatten()
