"""Each rank has rows of its own; every rank gets all of them, computes what its experts do, and outputs are summed where they belong."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.packing import RowLayout, pack, unpack
from dspark_lab.device import phase
from dspark_lab.ep.dispatch import Dispatched, EpContext, ExpertTable


class AllGatherDispatcher:
    """Gather, compute, reduce-scatter. Shapes are fixed, so the places of padded rows travel too, as zeros."""

    local_table = None

    def __init__(self, context: EpContext) -> None:
        self.ranks = context.ranks
        self.layout = RowLayout(hidden_size=context.hidden_size, topk=context.topk, dtype=context.dtype)
        self.table = ExpertTable(context.placement, context.device)
        self.first, self.num_local = context.ep_rank * context.placement.num_local, context.placement.num_local

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        with phase("ep::dispatch"):
            everywhere = self._gather(x, topk_ids, topk_weights, count)
            rows, local_ids, weights = unpack(everywhere.flatten(0, 1), self.layout, self.first, self.num_local)
            return Dispatched(x=rows, local_ids=local_ids, topk_weights=weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        with phase("ep::combine"):
            return self._scatter(y.view(self.ranks.size, -1, y.shape[1]))

    def wire_bytes(self, num_rows: int) -> int:
        """Each row to n − 1 others, and n − 1 shares of outputs back."""
        back = self.layout.hidden_size * self.layout.dtype.itemsize
        return (self.ranks.size - 1) * num_rows * (self.layout.row_bytes + back)

    def _packed(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """[T, row_bytes] uint8 of this rank's rows."""
        table, copies = self.table.table, self.table.num_copies
        return pack(x, topk_ids, topk_weights, self.layout, table, copies, count, out=out)

    def _gather(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Tensor:
        """[n, T, row_bytes] of every rank's rows."""
        return self.ranks.all_gather(self._packed(x, topk_ids, topk_weights, count))

    def _scatter(self, y: Tensor) -> Tensor:
        """[T, H]: the sum over ranks of this rank's block of ``y`` [n, T, H]."""
        return self.ranks.reduce_scatter(y)
