"""Packing in plain torch. T rows of H, k experts a row, n ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 16
NOBODY = -1
"""The expert id of a row that nobody computes."""


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """A row, its experts (int32) and their weights (float32) as one row of bytes; every part begins at a multiple of 16."""

    hidden_size: int
    topk: int
    dtype: torch.dtype

    @property
    def ids_at(self) -> int:
        return _aligned(self.hidden_size * self.dtype.itemsize)

    @property
    def weights_at(self) -> int:
        return self.ids_at + _aligned(4 * self.topk)

    @property
    def row_bytes(self) -> int:
        return self.weights_at + _aligned(4 * self.topk)


class Sent(NamedTuple):
    """What `pack_by_rank` gives."""

    rows: Tensor
    """[n·room, row_bytes] uint8: ``room`` places a rank; those left over belong to nobody."""
    places: Tensor
    """[n, T] int64: the place of row t for each rank; n·room where it is not sent there."""
    rows_to: Tensor
    """[n] int64: rows wanted by each rank, whether they found room or not."""


def physical_ids(topk_ids: Tensor, table: Tensor, num_copies: Tensor | None, count: Tensor | None) -> Tensor:
    """[T, k] int64 physical ids of logical ones; −1 stays, and rows from ``count`` on become −1.

    ``table`` [C, E]: copy c of each expert; row t takes copy t mod ``num_copies`` [E] (None: there is one of each).
    """
    there = topk_ids.clamp(min=0)
    if num_copies is None:
        physical = table[0][there]
    else:
        rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
        physical = table[rows % num_copies[there], there]
    kept = topk_ids >= 0
    if count is not None:
        kept &= _real(topk_ids.shape[0], count)
    return torch.where(kept, physical, NOBODY)


def pack(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layout: RowLayout,
    table: Tensor,
    num_copies: Tensor | None,
    count: Tensor | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``x`` [T, H], ``topk_ids`` [T, k] (logical; −1: none), ``topk_weights`` [T, k] as rows [T, row_bytes] uint8.

    The ids in there are `physical_ids`. Rows from ``count`` on are zeros of nobody, whatever they held.
    """
    ids = physical_ids(topk_ids, table, num_copies, count)
    if count is not None:
        real = _real(x.shape[0], count)
        x, topk_weights = torch.where(real, x, 0.0), torch.where(real, topk_weights, 0.0)
    rows = torch.cat(
        [_bytes(x, layout.ids_at), _bytes(ids.to(torch.int32), layout.weights_at - layout.ids_at),
         _bytes(topk_weights.float(), layout.row_bytes - layout.weights_at)], dim=1,
    )  # fmt: skip
    return rows if out is None else out.copy_(rows)


def unpack(rows: Tensor, layout: RowLayout, first: int, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """``rows`` [R, row_bytes] to x [R, H], local ids [R, k] int64 and weights [R, k] float32.

    Local: physical ids ``first`` … ``first + num_local − 1`` from 0 on; −1 for all others.
    """
    x = rows[:, : layout.hidden_size * layout.dtype.itemsize].view(layout.dtype)
    ids = rows[:, layout.ids_at : layout.ids_at + 4 * layout.topk].view(torch.int32).long()
    weights = rows[:, layout.weights_at : layout.weights_at + 4 * layout.topk].view(torch.float32)
    local = torch.where((ids >= first) & (ids < first + num_local), ids - first, NOBODY)
    return x.contiguous(), local, weights.contiguous()


def pack_by_rank(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layout: RowLayout,
    table: Tensor,
    num_copies: Tensor | None,
    count: Tensor | None,
    *,
    num_ranks: int,
    num_local: int,
    room: int,
    overflow: Tensor,
) -> Sent:
    """Each row once to every rank that has one of its experts, in order of rows; see `Sent`.

    Rank r has physical experts ``r · num_local`` on. Rows that find no room are added to ``overflow`` [1] int64.
    """
    num_rows, device = x.shape[0], x.device
    rows = pack(x, topk_ids, topk_weights, layout, table, num_copies, count)
    ids = physical_ids(topk_ids, table, num_copies, count)
    rank_of = torch.where(ids >= 0, ids // num_local, NOBODY)
    wanted = (rank_of[None] == torch.arange(num_ranks, device=device)[:, None, None]).any(dim=2)
    within = wanted.cumsum(dim=1) - 1
    fits = wanted & (within < room)
    overflow += (wanted & ~fits).sum()
    last = num_ranks * room
    places = torch.where(fits, torch.arange(0, last, room, device=device)[:, None] + within, last)
    source = torch.full((last + 1,), num_rows, device=device)
    source.scatter_(0, places.flatten(), torch.arange(num_rows, device=device).expand(num_ranks, -1).flatten())
    nobody = torch.zeros(1, layout.row_bytes, dtype=torch.uint8, device=device)
    nobody[:, layout.ids_at : layout.weights_at] = 255  # −1 in any integer
    source[last] = num_rows
    return Sent(torch.cat([rows, nobody])[source[:last]], places, wanted.sum(dim=1))


def sum_places(back: Tensor, places: Tensor) -> Tensor:
    """[T, H] of the dtype of ``back`` [P, H]: the sum over ranks of the outputs at ``places`` [n, T], P meaning none.

    Gathered and added up in order of rank in float32, never scattered: the same bits every time.
    """
    back_and_none = torch.cat([back, back.new_zeros(1, back.shape[1])])
    return back_and_none[places].float().sum(dim=0).to(back.dtype)


def _real(num_rows: int, count: Tensor) -> Tensor:
    return torch.arange(num_rows, device=count.device)[:, None] < count.reshape(1, 1)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _bytes(part: Tensor, width: int) -> Tensor:
    raw = part.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, width - raw.shape[1])) if raw.shape[1] < width else raw
