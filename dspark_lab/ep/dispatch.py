"""How rows reach the ranks of their experts and outputs come back: `dispatch`, then the experts, then `combine`.

Here: the interface, what all dispatchers share, and the two that send nothing on the way there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_kernels.packing import physical_ids
from dspark_lab.device import phase
from dspark_lab.ep.groups import RankGroup
from dspark_lab.plan.placement import Placement

DROPPED = -1
"""The expert id of a row that nobody computes here: padding, or another rank's expert."""


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What `dispatch` hands to the experts of one rank. R rows: its own T, or those that others sent."""

    x: Tensor
    """[R, H] rows."""
    local_ids: Tensor
    """[R, k] int64 index among this rank's experts, or −1: dropped before any counting."""
    topk_weights: Tensor
    """[R, k]."""
    rows_to: Tensor | None = None
    """[ep_size] int64 rows that this rank sent to each, itself included; None where every rank gets the same."""
    state: Any = None
    """What the dispatcher's own `combine` has to know."""


class Dispatcher(Protocol):
    """How rows reach the experts' ranks and outputs come back.

    A rank that computes nothing joins every collective. Padded rows are never computed and come back as exactly 0, whatever
    they hold. Optional, beside the two methods: ``local_table`` [C, num_experts] int64 (local index of copy c, or −1)
    with ``num_copies`` [num_experts] (None: there is one of each), with which a router may make `Dispatched` itself; ``fixed_sizes``, a bool that the engine sets: whether it uses graphs; ``overflow`` [1] int64 on the device, rows lost so far for want of room;
    ``wire_bytes(num_rows)``, what a dispatch and combine of so many rows sends whatever is in them; and ``bytes_a_row``,
    what each row of `Dispatched.rows_to` that leaves this rank sends beside.
    """

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        """Rows ``x`` [T, H] with ``topk_ids`` [T, k] (logical experts; −1: none) and ``topk_weights`` [T, k].

        ``count``: one int32 on the device; rows from there on are padding. None: all are real.
        """
        ...

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        """What the experts made of ``handle.x``, ``y`` [R, H], to the layer's whole output [T, H] of this rank's rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class EpContext:
    """All that a dispatcher of one layer is made from."""

    placement: Placement
    ep_rank: int
    ranks: RankGroup
    """All ranks of the layer. Rank r is EP rank r where no expert is shared, which all but ``all_reduce`` need."""
    rows_alike: bool
    """Whether all ranks hold the same rows (attention replicated or cut by heads), or each its own (attention DP)."""
    topk: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    fixed_sizes: bool = False
    """Whether shapes must not depend on values: inside CUDA graphs."""
    capacity_factor: float = 1.0


class LocalDispatcher:
    """EP1: all experts are here, or this rank's part of each. No table, ids untouched, and ``count`` is never read."""

    def __init__(self, all_reduce: Callable[[Tensor], Any] | None = None, ring_bytes: float = 0.0) -> None:
        self.all_reduce = all_reduce
        """Adds up the parts of the experts; None where they are whole."""
        self.ring_bytes = ring_bytes
        """What a row of that sends."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        return Dispatched(x=x, local_ids=topk_ids, topk_weights=topk_weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        if self.all_reduce is not None:
            with phase("moe::combine"):
                self.all_reduce(y)
        return y

    def wire_bytes(self, num_rows: int) -> int:
        return round(num_rows * self.ring_bytes)


class AllReduceDispatcher:
    """Every rank has all rows and computes those of its own experts, or of its parts of them.

    One all-reduce of the layer's output adds up experts and parts alike.
    """

    def __init__(self, context: EpContext) -> None:
        self.ranks = context.ranks
        self.ring_bytes = ring_bytes(context.ranks.size, context.hidden_size * context.dtype.itemsize)
        self.table = ExpertTable(context.placement, context.device)
        self.first, self.num_local = context.ep_rank * context.placement.num_local, context.placement.num_local
        self.local_table, self.num_copies = self.table.local(self.first), self.table.num_copies

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        with phase("ep::dispatch"):
            local_ids = keep_range(self.table.physical(topk_ids, count), self.first, self.num_local)
            return Dispatched(x=x, local_ids=local_ids, topk_weights=topk_weights)

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        with phase("ep::combine"):
            self.ranks.all_reduce(y)
            return y

    def wire_bytes(self, num_rows: int) -> int:
        return round(num_rows * self.ring_bytes)


def ring_bytes(num_ranks: int, row_bytes: int) -> float:
    """What one rank sends for a row in an all-reduce, as a ring sends it: 2·(n−1)/n of the row."""
    return 2 * (num_ranks - 1) / num_ranks * row_bytes


class ExpertTable:
    """Logical experts to physical ones on the device; of several copies each row takes the one whose turn it is."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        copies = placement.copies
        most = max(map(len, copies))
        table = [[c[turn % len(c)] for c in copies] for turn in range(most)]
        self._placement = placement
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        """[C, num_experts] physical id of copy c of each expert."""
        self.num_copies = torch.tensor([len(c) for c in copies], device=device) if most > 1 else None
        """[num_experts]; None where there is one of each."""

    def physical(self, topk_ids: Tensor, count: Tensor | None) -> Tensor:
        """[T, k] physical ids of ``topk_ids`` [T, k]; −1 stays −1, and rows from ``count`` on become −1.

        The mask comes after the map: a table indexed with −1 would give its last entry, a real expert.
        """
        return physical_ids(topk_ids, self.table, self.num_copies, count)

    def local(self, first: int) -> Tensor:
        """[C, num_experts] local index of each copy on the rank whose physical ids begin at ``first``, or −1."""
        return keep_range(self.table, first, self._placement.num_local)


def real_rows(num_rows: int, count: Tensor) -> Tensor:
    """[num_rows, 1] bool: rows before ``count``."""
    return torch.arange(num_rows, device=count.device)[:, None] < count.reshape(1, 1)


def keep_range(physical: Tensor, first: int, num_local: int) -> Tensor:
    """Physical ids to indices from 0 among ``first`` … ``first + num_local - 1``; −1 outside and where it was −1."""
    local = physical - first
    return torch.where((physical >= first) & (local < num_local), local, DROPPED)
