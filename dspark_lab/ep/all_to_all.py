"""Tokens travel to their experts and back: each row once to every rank that has one of its experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_kernels.packing import RowLayout, pack, pack_by_rank, sum_places, unpack
from dspark_lab.device import phase
from dspark_lab.ep.dispatch import DROPPED, Dispatched, EpContext, ExpertTable


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What went where."""

    places: Tensor
    """[n, T] place of row t among the rows that were sent, for each rank; one beyond the last where it was not sent there."""
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
        self.layout = RowLayout(hidden_size=context.hidden_size, topk=context.topk, dtype=context.dtype)
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
            send = self._send_fixed if self.fixed else self._send
            sent, rows_to, arrived = send(x, topk_ids, topk_weights, count)
            x, local_ids, weights = unpack(arrived, self.layout, self.first, self.num_local)
            return Dispatched(x=x, local_ids=local_ids, topk_weights=weights, rows_to=rows_to, state=sent)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        with phase("ep::combine"):
            sent: _Sent = handle.state
            back = self.ranks.all_to_all(y, sent.receive, sent.send)
            return sum_places(back, sent.places)

    def wire_bytes(self, num_rows: int) -> int:
        """Of graphs, whose room travels full or empty; eagerly nothing but what `bytes_a_row` counts."""
        there_and_back = self.layout.row_bytes + self._output_bytes
        return (self.ranks.size - 1) * self.capacity(num_rows) * there_and_back if self.fixed else 0

    @property
    def bytes_a_row(self) -> int:
        """Of one row that travels, and its output back, where only rows that are wanted travel."""
        return 0 if self.fixed else self.layout.row_bytes + self._output_bytes

    @property
    def _output_bytes(self) -> int:
        return self.layout.hidden_size * self.layout.dtype.itemsize

    def _send(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None
    ) -> tuple[_Sent, Tensor, Tensor]:
        """As many rows as are wanted; waits for their numbers."""
        physical = self.table.physical(topk_ids, count)
        rank_of = torch.where(physical >= 0, physical // self.num_local, DROPPED)
        wanted = (rank_of[None] == torch.arange(self.ranks.size, device=x.device)[:, None, None]).any(dim=2)  # [n, T]
        rows = pack(x, topk_ids, topk_weights, self.layout, self.table.table, self.table.num_copies, count)
        rows_to = wanted.sum(dim=1)
        send, receive = torch.stack([rows_to, self.ranks.all_to_all(rows_to)]).tolist()
        places = torch.where(wanted, wanted.flatten().cumsum(0).view_as(wanted) - 1, sum(send))
        arrived = self.ranks.all_to_all(rows[wanted.nonzero()[:, 1]], send, receive)
        return _Sent(places=places, send=send, receive=receive), rows_to, arrived

    def _send_fixed(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None
    ) -> tuple[_Sent, Tensor, Tensor]:
        """Room for `capacity` rows a rank; what does not fit is counted and left out."""
        sent = pack_by_rank(
            x, topk_ids, topk_weights, self.layout, self.table.table, self.table.num_copies, count,
            num_ranks=self.ranks.size, num_local=self.num_local, room=self.capacity(x.shape[0]), overflow=self.overflow,
        )  # fmt: skip
        return _Sent(places=sent.places), sent.rows_to, self.ranks.all_to_all(sent.rows)
