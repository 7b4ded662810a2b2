"""Tokens travel to their experts and back: each row once to every rank that has one of its experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.device import phase
from dspark_lab.ep.dispatch import DROPPED, Dispatched, EpContext, ExpertTable, keep_range
from dspark_lab.ep.packing import RowPacking


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What went where."""

    places: Tensor
    """[n, T] place of row t among the rows that were sent, for each rank; the last place holds zeros."""
    send: list[int] | None = None
    receive: list[int] | None = None
    """Rows to and from each rank; None where all are the same."""


class AllToAllDispatcher:
    """Sizes as the routing wants them where the host may wait for them; in graphs room for ``capacity`` rows a pair of ranks.

    Rows that find no room are counted in `overflow`, which the engine reads with each round's results: their outputs lack
    an expert, so the run ends.
    """

    local_table = None

    def __init__(self, context: EpContext) -> None:
        self.ranks, self.fixed_sizes = context.ranks, context.fixed_sizes
        self.capacity_factor = context.capacity_factor
        self.packing = RowPacking(context.hidden_size, context.topk, context.dtype)
        self.table = ExpertTable(context.placement, context.device)
        self.first, self.num_local = context.ep_rank * context.placement.num_local, context.placement.num_local
        self.overflow = torch.zeros(1, dtype=torch.int64, device=context.device)

    @property
    def fixed(self) -> bool:
        """Whether every rank gets room for as many rows, whatever the routing wants."""
        return self.fixed_sizes or self.capacity_factor < 1

    def capacity(self, num_rows: int) -> int:
        """Rows that one rank can send to one other, of ``num_rows`` padded ones."""
        return max(math.ceil(num_rows * self.capacity_factor), 1)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        with phase("ep::dispatch"):
            physical = self.table.physical(topk_ids, count)
            rank_of = torch.where(physical >= 0, physical // self.num_local, DROPPED)
            ranks = torch.arange(self.ranks.size, device=x.device)
            wanted = (rank_of[None] == ranks[:, None, None]).any(dim=2)  # [n, T]
            rows = self.packing.pack(x, physical, topk_weights)
            sent, arrived = (self._send_fixed if self.fixed else self._send)(rows, wanted)
            x, ids, weights = self.packing.unpack(arrived)
            local_ids = keep_range(ids, self.first, self.num_local)
            rows_to = wanted.sum(dim=1)
            return Dispatched(x=x, local_ids=local_ids, topk_weights=weights, rows_to=rows_to, state=sent)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        with phase("ep::combine"):
            sent: _Sent = handle.state
            back = self.ranks.all_to_all(y, sent.receive, sent.send)
            back = torch.cat([back, back.new_zeros(1, back.shape[1])])
            # Gathered and summed in order of rank, never scattered: the same bits every time.
            return back[sent.places].float().sum(dim=0).to(y.dtype)

    def wire_bytes(self, num_rows: int) -> int:
        """Of graphs, whose room travels full or empty; eagerly nothing but what `bytes_a_row` counts."""
        there_and_back = self.packing.row_bytes + self._output_bytes
        return (self.ranks.size - 1) * self.capacity(num_rows) * there_and_back if self.fixed else 0

    @property
    def bytes_a_row(self) -> int:
        """Of one row that travels, and its output back, where only rows that are wanted travel."""
        return 0 if self.fixed else self.packing.row_bytes + self._output_bytes

    @property
    def _output_bytes(self) -> int:
        return self.packing.hidden_size * self.packing.dtype.itemsize

    def _send(self, rows: Tensor, wanted: Tensor) -> tuple[_Sent, Tensor]:
        """As many rows as are wanted; waits for their numbers."""
        numbers = wanted.sum(dim=1)
        send, receive = torch.stack([numbers, self.ranks.all_to_all(numbers)]).tolist()
        places = torch.where(wanted, wanted.flatten().cumsum(0).view_as(wanted) - 1, sum(send))
        order = wanted.nonzero()[:, 1]
        return _Sent(places=places, send=send, receive=receive), self.ranks.all_to_all(rows[order], send, receive)

    def _send_fixed(self, rows: Tensor, wanted: Tensor) -> tuple[_Sent, Tensor]:
        """Room for `capacity` rows a rank; what does not fit is counted and left out."""
        num_ranks, num_rows = wanted.shape
        room = self.capacity(num_rows)
        within = wanted.cumsum(dim=1) - 1
        fits = wanted & (within < room)
        self.overflow += (wanted & ~fits).sum()
        last = num_ranks * room
        first = torch.arange(0, last, room, device=rows.device)[:, None]
        places = torch.where(fits, first + within, last)
        source = torch.full((last + 1,), num_rows, device=rows.device)
        row_numbers = torch.arange(num_rows, device=rows.device).expand(num_ranks, -1)
        source.scatter_(0, places.flatten(), row_numbers.flatten())
        with_nobody = torch.cat([rows, self.packing.nobody(1, rows.device)])
        return _Sent(places=places), self.ranks.all_to_all(with_nobody[source[:last]])
