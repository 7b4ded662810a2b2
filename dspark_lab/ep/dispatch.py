"""Expert parallelism behind one interface: `dispatch` says which rows are this rank's, `combine` puts the outputs together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.device import phase
from dspark_lab.ep.groups import RankGroup
from dspark_lab.errors import LabError
from dspark_lab.plan.padding import enable_num_token_non_padded
from dspark_lab.plan.placement import Placement, place

DROPPED = -1
"""The expert id of a row that nobody computes here: padding, or another rank's expert."""


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What `dispatch` hands to the experts of one rank."""

    x: Tensor
    """[T, H] rows."""
    local_ids: Tensor
    """[T, k] int64 index among this rank's experts, or −1: dropped before any counting."""
    topk_weights: Tensor
    """[T, k]."""


class Dispatcher(Protocol):
    """How rows reach the experts' ranks and outputs come back."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        """Rows ``x`` [T, H] with ``topk_ids`` [T, k] (logical experts); ``count``: rows from there on are padding."""
        ...

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        """This rank's share ``y`` [T, H] of the layer's output to the whole output [T, H]."""
        ...


class LocalDispatcher:
    """EP1: all experts are here, or this rank's part of each. No table, ids untouched, and ``count`` is never read."""

    def __init__(self, all_reduce: Callable[[Tensor], Any] | None = None) -> None:
        self.all_reduce = all_reduce
        """Adds up the parts of the experts; None where they are whole."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        return Dispatched(x=x, local_ids=topk_ids, topk_weights=topk_weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        if self.all_reduce is not None:
            with phase("moe::combine"):
                self.all_reduce(y)
        return y


class AllReduceDispatcher:
    """Every rank has all rows and computes those of its own experts, or of its parts of them.

    One all-reduce of the layer's output adds up experts and parts alike.
    """

    def __init__(
        self, placement: Placement, ep_rank: int, all_reduce: Callable[[Tensor], Any], device: torch.device | str
    ) -> None:
        self.all_reduce = all_reduce
        self.num_local = placement.num_local
        self.first = ep_rank * placement.num_local
        self.physical = torch.tensor(placement.logical_to_physical, dtype=torch.int64, device=device)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        with phase("ep::dispatch"):
            physical = mask_padded(self.physical[topk_ids], count)
            local_ids = keep_range(physical, self.first, self.num_local)
            return Dispatched(x=x, local_ids=local_ids, topk_weights=topk_weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        with phase("ep::combine"):
            self.all_reduce(y)
            return y


def mask_padded(topk_ids: Tensor, count: Tensor | None) -> Tensor:
    """``topk_ids`` [T, k] with −1 in rows i >= ``count`` (one int32 on the device); as it is where ``count`` is None.

    Comes after the map to physical ids: a table indexed with −1 would give its last entry, a real expert.
    """
    if count is None:
        return topk_ids
    rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
    return torch.where(rows < count.reshape(1, 1), topk_ids, DROPPED)


def keep_range(physical: Tensor, first: int, num_local: int) -> Tensor:
    """Physical ids to indices from 0 among ``first`` … ``first + num_local - 1``; −1 outside and where it was −1."""
    local = physical - first
    return torch.where((physical >= first) & (local < num_local), local, DROPPED)


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """One rank's part in the experts, as every MoE layer of target and drafter needs it."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ep_rank: int = 0
    moe_tp_rank: int = 0
    """Which part of each of its experts the rank holds."""
    mask_padding: bool = True
    all_reduce: Callable[[Tensor], Any] | None = None
    """Adds a tensor up over all ranks of the layer, in place; needed where there is more than one."""

    @classmethod
    def of(cls, parallel: ParallelConfig, moe: RankGroup, *, mask_padding: bool = True) -> ExpertGroup:
        """The part of rank ``moe.rank``: the ranks that share an expert are neighbours."""
        ep_rank, moe_tp_rank = divmod(moe.rank, parallel.moe_tp)
        return cls(
            parallel=parallel,
            ep_rank=ep_rank,
            moe_tp_rank=moe_tp_rank,
            mask_padding=mask_padding,
            all_reduce=moe.all_reduce if moe.size > 1 else None,
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

    def placement(self, num_experts: int) -> Placement:
        return place(self.parallel.placement, num_experts, self.parallel.ep_size)

    def dispatcher(self, num_experts: int, device: torch.device | str) -> Dispatcher:
        if self.all_reduce is None or self.parallel.ep_size == 1:
            return LocalDispatcher(self.all_reduce)
        return AllReduceDispatcher(self.placement(num_experts), self.ep_rank, self.all_reduce, device)
