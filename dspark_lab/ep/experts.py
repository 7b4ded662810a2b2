"""`ExpertGroup`: one rank's part in the experts, and the dispatcher of each of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.dispatch import Dispatcher, EpContext, LocalDispatcher, ring_bytes
from dspark_lab.ep.groups import ONE_RANK, OneRank, RankGroup
from dspark_lab.ep.registry import factory_of
from dspark_lab.ep.shards import ChunkedRows
from dspark_lab.errors import LabError
from dspark_lab.plan.padding import chunk_ranks, enable_num_token_non_padded
from dspark_lab.plan.placement import Placement, place


class _SumOnly(OneRank):
    """A rank of several that are put together elsewhere: it can be asked for a sum, and for nothing else."""

    def __init__(self, rank: int, size: int, all_reduce: Callable[[Tensor], Any]) -> None:
        self.rank, self.size, self._sum = rank, size, all_reduce

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._sum(tensor)
        return tensor


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """One rank's part in the experts, as every MoE layer of target and drafter needs it."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ep_rank: int = 0
    moe_tp_rank: int = 0
    """Which part of each of its experts the rank holds."""
    mask_padding: bool = True
    padding_policy: str = "mask"
    fixed_sizes: bool = False
    """Whether shapes must not depend on values: the engine uses graphs."""
    all_reduce: Callable[[Tensor], Any] | None = None
    """Adds a tensor up over all ranks of the layer, in place; needed where there is more than one and no ``ranks``."""
    ranks: RankGroup | None = None
    """All ranks of the layer."""
    rows: RankGroup = ONE_RANK
    """Those of them that hold the same rows as this one."""
    loads: Sequence[Sequence[float]] | None = None
    """[MoE layers][num_experts] rows of each expert, of the one model that is being built: what ``balanced`` spreads."""

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        moe: RankGroup,
        rows: RankGroup | None = None,
        *,
        mask_padding: bool = True,
        padding_policy: str = "mask",
        fixed_sizes: bool = False,
    ) -> ExpertGroup:
        """The part of rank ``moe.rank``: the ranks that share an expert are neighbours. ``rows``: by default all ranks."""
        ep_rank, moe_tp_rank = divmod(moe.rank, parallel.moe_tp)
        return cls(
            parallel=parallel,
            ep_rank=ep_rank,
            moe_tp_rank=moe_tp_rank,
            mask_padding=mask_padding,
            padding_policy=padding_policy,
            fixed_sizes=fixed_sizes,
            all_reduce=moe.all_reduce if moe.size > 1 else None,
            ranks=moe,
            rows=moe if rows is None else rows,
        )

    def __post_init__(self) -> None:
        ep, moe_tp = self.parallel.ep_size, self.parallel.moe_tp
        if not 0 <= self.ep_rank < ep:
            raise LabError(f"ep_rank={self.ep_rank} is not within 0 to {ep - 1} (ep_size={ep}).")
        if not 0 <= self.moe_tp_rank < moe_tp:
            raise LabError(f"moe_tp_rank={self.moe_tp_rank} is not within 0 to {moe_tp - 1} (moe_tp={moe_tp}).")
        if self.num_ranks > 1 and self.all_reduce is None:
            wants = f"ep_size={ep}" if ep > 1 else f"tp_size={self.parallel.tp_size}"
            raise LabError(f"{wants} needs a process group to add up the ranks' outputs, and there is none.")

    @property
    def num_ranks(self) -> int:
        """Ranks whose outputs are added up: ep_size · moe_tp."""
        return self.parallel.ep_size * self.parallel.moe_tp

    @property
    def reads_scalar(self) -> bool:
        """Whether MoE layers read `num_token_non_padded`: the predicate holds and the mask is compiled in."""
        return enable_num_token_non_padded(self.parallel) and self.mask_padding

    def placement(self, num_experts: int, moe_layer: int = 0) -> Placement:
        """Of the ``moe_layer``-th MoE layer."""
        p = self.parallel
        load = None if self.loads is None else self.loads[moe_layer]
        return place(p.placement, num_experts, p.ep_size, p.num_redundant_experts, load=load)

    def dispatcher(
        self, placement: Placement, *, topk: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> Dispatcher:
        """The config's dispatcher for a layer with ``placement``; at EP1 always the local one."""
        if self.all_reduce is None or self.parallel.ep_size == 1:
            return LocalDispatcher(self.all_reduce, ring_bytes(self.num_ranks, hidden_size * dtype.itemsize))
        chunked = chunk_ranks(self.parallel) > 1
        context = EpContext(
            placement=placement,
            ep_rank=self.ep_rank,
            ranks=self.ranks or _SumOnly(self.ep_rank, self.num_ranks, self.all_reduce),
            rows_alike=self.parallel.attn_dp == 1 and not chunked,
            topk=topk,
            hidden_size=hidden_size,
            dtype=dtype,
            device=device,
            fixed_sizes=self.fixed_sizes,
            capacity_factor=self.parallel.capacity_factor,
        )
        made = factory_of(self.parallel.dispatcher)(context)
        return ChunkedRows(made, self.rows, hidden_size * dtype.itemsize) if chunked else made
