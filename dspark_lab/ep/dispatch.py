"""Expert parallelism behind one interface: `dispatch` says which rows are this rank's, `combine` puts the outputs together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.device import phase
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
    """EP1: all experts are here. No table, ids untouched, and ``count`` is never read."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        return Dispatched(x=x, local_ids=topk_ids, topk_weights=topk_weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        return y


class AllReduceDispatcher:
    """Every rank has all rows and computes those of its own experts; one all-reduce of the layer's output adds them up."""

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
    """One rank's part in expert parallelism, as every MoE layer of target and drafter needs it."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ep_rank: int = 0
    mask_padding: bool = True
    all_reduce: Callable[[Tensor], Any] | None = None
    """Adds a tensor up over the EP ranks, in place; needed where ``ep_size > 1``."""

    def __post_init__(self) -> None:
        if not 0 <= self.ep_rank < self.parallel.ep_size:
            raise LabError(
                f"ep_rank={self.ep_rank} is not within 0 to {self.parallel.ep_size - 1} (ep_size={self.parallel.ep_size})."
            )
        if self.parallel.ep_size > 1 and self.all_reduce is None:
            raise LabError(
                f"ep_size={self.parallel.ep_size} needs a process group to add up the ranks' outputs, and there is none."
            )

    @property
    def reads_scalar(self) -> bool:
        """Whether MoE layers read `num_token_non_padded`: the predicate holds and the mask is compiled in."""
        return enable_num_token_non_padded(self.parallel) and self.mask_padding

    def placement(self, num_experts: int) -> Placement:
        return place(self.parallel.placement, num_experts, self.parallel.ep_size)

    def dispatcher(self, num_experts: int, device: torch.device | str) -> Dispatcher:
        if self.all_reduce is None or self.parallel.ep_size == 1:
            return LocalDispatcher()
        return AllReduceDispatcher(self.placement(num_experts), self.ep_rank, self.all_reduce, device)


def group_all_reduce(group: dist.ProcessGroup | None) -> Callable[[Tensor], Any] | None:
    """The sum over ``group`` (None: the default group); None where no process group exists."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return lambda tensor: dist.all_reduce(tensor, group=group)
