"""What every dispatcher must give, in plain torch: all ranks' rows in one process, no ranks, no placement. For tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Expert = Callable[[int, Tensor], Tensor]
"""``expert(e, rows)``: what logical expert ``e`` makes of ``rows`` [R, H]."""


def local(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: int | None, expert: Expert) -> Tensor:
    """[T, H]: each real row's weighted sum over its experts, one row and one expert at a time; padded rows exactly 0."""
    out = torch.zeros_like(x)
    for row in range(x.shape[0] if count is None else count):
        total = torch.zeros(x.shape[1])
        for e, weight in zip(topk_ids[row].tolist(), topk_weights[row], strict=True):
            if e >= 0:
                total += weight * expert(e, x[row : row + 1])[0].float()
        out[row] = total.to(x.dtype)
    return out


all_reduce = local
"""Every rank has all rows: the layer is what one rank would compute."""


def all_gather(
    xs: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    counts: Sequence[int | None],
    expert: Expert,
) -> list[Tensor]:
    """By rank, [T, H]: each rank's own rows; where their experts are changes nothing."""
    return [local(*rank, expert) for rank in zip(xs, topk_ids, topk_weights, counts, strict=True)]


all_to_all = symm_mem = all_gather
