"""Where several ranks hold the same rows: each dispatches its chunk of them, and all get all outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_lab.device import phase
from dspark_lab.ep.dispatch import Dispatched, Dispatcher
from dspark_lab.ep.groups import RankGroup
from dspark_lab.errors import LabError


class ChunkedRows:
    """``inner`` over chunk ``rows.rank`` of ``rows.size``; a chunk's count is local(r) = clamp(G − c·r, 0, c), c = W / t."""

    local_table = None

    def __init__(self, inner: Dispatcher, rows: RankGroup, row_bytes: int) -> None:
        self.inner, self.rows, self.row_bytes = inner, rows, row_bytes

    @property
    def overflow(self) -> Tensor | None:
        return getattr(self.inner, "overflow", None)

    @property
    def fixed_sizes(self) -> bool:
        return getattr(self.inner, "fixed_sizes", True)

    @fixed_sizes.setter
    def fixed_sizes(self, on: bool) -> None:
        if hasattr(self.inner, "fixed_sizes"):
            self.inner.fixed_sizes = on  # pyright: ignore[reportAttributeAccessIssue]

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        chunk, left = divmod(x.shape[0], self.rows.size)
        if left:
            raise LabError(
                f"{x.shape[0]} padded rows are no multiple of the {self.rows.size} ranks that share them; "
                "pad the batch to one, or choose dispatcher='all_reduce'."
            )
        mine = slice(chunk * self.rows.rank, chunk * (self.rows.rank + 1))
        local = None if count is None else local_count(count, chunk, self.rows.rank)
        return self.inner.dispatch(x[mine], topk_ids[mine], topk_weights[mine], local)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        mine = self.inner.combine(y, handle)
        with phase("ep::combine"):
            return self.rows.all_gather(mine).flatten(0, 1)

    def wire_bytes(self, num_rows: int) -> int:
        """The chunk's, and its outputs to the other ranks of the rows."""
        inner, chunk = getattr(self.inner, "wire_bytes", None), num_rows // self.rows.size
        return (inner(chunk) if inner is not None else 0) + round((self.rows.size - 1) * chunk * self.row_bytes)

    @property
    def bytes_a_row(self) -> int:
        return getattr(self.inner, "bytes_a_row", 0)


def local_count(count: Tensor, chunk: int, rank: int) -> Tensor:
    """`plan.padding.local_counts` of one rank, on the device: int32 of one element."""
    return (count.reshape(1) - chunk * rank).clamp(0, chunk).to(torch.int32)
