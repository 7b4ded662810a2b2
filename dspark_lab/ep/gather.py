"""Each rank has rows of its own; every rank gets all of them, computes what its experts do, and outputs are summed where they belong."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_lab.device import phase
from dspark_lab.ep.dispatch import Dispatched, EpContext, ExpertTable, keep_range, real_rows
from dspark_lab.ep.packing import RowPacking


class AllGatherDispatcher:
    """Gather, compute, reduce-scatter. Shapes are fixed, so the places of padded rows travel too, as zeros."""

    local_table = None

    def __init__(self, context: EpContext) -> None:
        self.ranks = context.ranks
        self.packing = RowPacking(context.hidden_size, context.topk, context.dtype)
        self.table = ExpertTable(context.placement, context.device)
        self.first, self.num_local = context.ep_rank * context.placement.num_local, context.placement.num_local

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        with phase("ep::dispatch"):
            physical = self.table.physical(topk_ids, count)
            if count is not None:
                x = torch.where(real_rows(x.shape[0], count), x, 0.0)
            everywhere = self._gather(self.packing.pack(x, physical, topk_weights))
            rows, ids, weights = self.packing.unpack(everywhere.flatten(0, 1))
            local_ids = keep_range(ids, self.first, self.num_local)
            return Dispatched(x=rows, local_ids=local_ids, topk_weights=weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        with phase("ep::combine"):
            return self._scatter(y.view(self.ranks.size, -1, y.shape[1]))

    def wire_bytes(self, num_rows: int) -> int:
        """Each row to n − 1 others, and n − 1 shares of outputs back."""
        back = self.packing.hidden_size * self.packing.dtype.itemsize
        return (self.ranks.size - 1) * num_rows * (self.packing.row_bytes + back)

    def _gather(self, rows: Tensor) -> Tensor:
        """[n, T, row_bytes] of every rank's ``rows`` [T, row_bytes]."""
        return self.ranks.all_gather(rows)

    def _scatter(self, y: Tensor) -> Tensor:
        """[T, H]: the sum over ranks of this rank's block of ``y`` [n, T, H]."""
        return self.ranks.reduce_scatter(y)
