"""Dispatch over symmetric memory: ranks read each other's buffers, with a barrier in between; no multicast."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_lab.device import phase
from dspark_lab.ep.dispatch import AllReduceDispatcher, Dispatched, EpContext
from dspark_lab.ep.gather import AllGatherDispatcher
from dspark_lab.ep.groups import ProcessRanks, RankGroup
from dspark_lab.errors import LabError

MAX_ROWS = 1024
"""Rows of a rank that the buffers hold; longer batches (prefills) go through the group's own collectives."""


class PeerBuffers(Protocol):
    """One buffer a rank, of equal size, that all ranks can read."""

    def mine(self) -> Tensor:
        """[num_bytes] uint8."""
        ...

    def barrier(self) -> None:
        """On the stream: what every rank wrote before it can be read after it."""
        ...

    def of(self, rank: int) -> Tensor:
        """[num_bytes] uint8 of ``rank``, to be read after a barrier."""
        ...


class SymmetricBuffers:
    """On GPUs of one host: `torch.distributed._symmetric_memory`, peers mapped into each other's address space."""

    def __init__(self, num_bytes: int, group: Any, device: torch.device) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory as symm_mem

        self._tensor = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._tensor, group)
        size = self._handle.world_size
        self._peers = [self._handle.get_buffer(r, (num_bytes,), torch.uint8) for r in range(size)]

    def mine(self) -> Tensor:
        return self._tensor

    def barrier(self) -> None:
        self._handle.barrier()

    def of(self, rank: int) -> Tensor:
        return self._peers[rank]


class GatheredBuffers:
    """The plain stand-in over any group: a barrier is an all-gather of the buffers."""

    def __init__(self, num_bytes: int, ranks: RankGroup, device: torch.device) -> None:
        self._ranks, self._mine = ranks, torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._all = self._mine[None]

    def mine(self) -> Tensor:
        return self._mine

    def barrier(self) -> None:
        self._all = self._ranks.all_gather(self._mine)

    def of(self, rank: int) -> Tensor:
        return self._all[rank]


_shared: dict[Any, Any] = {}
"""Layers follow each other in a stream, so all of a process use the same buffers."""


def peer_buffers(num_bytes: int, context: EpContext, use: str) -> PeerBuffers:
    """The buffers for ``use`` (``rows`` or ``outputs``), made once a process; the first call is a collective."""
    if context.device.type != "cuda":
        return GatheredBuffers(num_bytes, context.ranks, context.device)
    group = _process_group(context.ranks)
    key = (id(group), use, num_bytes)
    if key not in _shared:
        _shared[key] = SymmetricBuffers(num_bytes, group, context.device)
    return _shared[key]


def forget_buffers() -> None:
    """Gives the buffers back; must come before the process group ends."""
    _shared.clear()


def _process_group(ranks: RankGroup) -> Any:
    if not isinstance(ranks, ProcessRanks):
        raise LabError("dispatcher='symm_mem' needs a process group of several GPUs of one host; choose 'all_reduce'.")
    return ranks.group


class SymmGatherDispatcher(AllGatherDispatcher):
    """`all_gather` by reading: rows go into this rank's buffer, a barrier, all read all; outputs the same way back.

    Two buffers: whoever writes one has passed the other's barrier, behind which nobody reads the first any more.
    """

    def __init__(self, context: EpContext) -> None:
        super().__init__(context)
        n = context.ranks.size
        item = context.dtype.itemsize
        self._rows = peer_buffers(MAX_ROWS * self.layout.row_bytes, context, "rows")
        self._outputs = peer_buffers(n * MAX_ROWS * context.hidden_size * item, context, "outputs")

    def _gather(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Tensor:
        num_rows, width = x.shape[0], self.layout.row_bytes
        if num_rows > MAX_ROWS:
            return super()._gather(x, topk_ids, topk_weights, count)
        size = num_rows * width
        self._packed(x, topk_ids, topk_weights, count, out=self._rows.mine()[:size].view(num_rows, width))
        self._rows.barrier()
        return torch.stack([self._rows.of(r)[:size].view(num_rows, width) for r in range(self.ranks.size)])

    def _scatter(self, y: Tensor) -> Tensor:
        num_ranks, num_rows, _ = y.shape
        if num_rows > MAX_ROWS:
            return super()._scatter(y)
        raw = y.contiguous().view(torch.uint8)
        self._outputs.mine()[: raw.numel()].copy_(raw.view(-1))
        self._outputs.barrier()
        parts = []
        for r in range(num_ranks):
            blocks = self._outputs.of(r)[: raw.numel()].view(y.dtype).view(y.shape)
            parts.append(blocks[self.ranks.rank])
        return torch.stack(parts).sum(dim=0, dtype=torch.float32).to(y.dtype)


class SymmReduceDispatcher(AllReduceDispatcher):
    """`all_reduce` as one kernel: each rank copies its share into its buffer, waits, and adds up everybody's."""

    def __init__(self, context: EpContext) -> None:
        super().__init__(context)
        num_bytes = MAX_ROWS * context.hidden_size * context.dtype.itemsize
        self._buffers = peer_buffers(num_bytes, context, "outputs")
        self._group_name = _process_group(context.ranks).group_name if context.device.type == "cuda" else ""

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        if y.shape[0] > MAX_ROWS:
            return super().combine(y, handle)
        with phase("ep::combine"):
            if y.device.type == "cuda":
                mine = self._buffers.mine()[: y.numel() * y.element_size()].view(y.dtype)
                out = torch.empty_like(y)
                torch.ops.symm_mem.one_shot_all_reduce_copy_out(
                    mine, y.contiguous().view(-1), "sum", self._group_name, out.view(-1)
                )
                return out
            return self._summed(y)

    def _summed(self, y: Tensor) -> Tensor:
        """The plain form: write, barrier, read all, add."""
        raw = y.contiguous().view(torch.uint8).view(-1)
        self._buffers.mine()[: raw.numel()].copy_(raw)
        self._buffers.barrier()
        parts = [self._buffers.of(r)[: raw.numel()].view(y.dtype).view(y.shape) for r in range(self.ranks.size)]
        return torch.stack(parts).sum(dim=0, dtype=torch.float32).to(y.dtype)


def symmetric(context: EpContext) -> SymmGatherDispatcher | SymmReduceDispatcher:
    """The one that fits how rows lie."""
    return SymmReduceDispatcher(context) if context.rows_alike else SymmGatherDispatcher(context)
