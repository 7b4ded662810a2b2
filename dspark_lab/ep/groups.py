"""Groups of ranks and what they say to each other: the one place that knows torch.distributed's process groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.errors import LabError

TIMEOUT = timedelta(seconds=60)


class RankGroup(Protocol):
    """Ranks that share a layer. Both collectives have fixed shapes and never wait for the host, so graphs may hold them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over the ranks, in place; returned too."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *shape]: the ``tensor`` of every rank, in order of rank."""
        ...


class OneRank:
    """A group of one: nothing is sent."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]


ONE_RANK = OneRank()


class ProcessRanks:
    """Real ranks: a process group of torch.distributed (NCCL or gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather_into_tensor(out, tensor.contiguous()[None], group=self.group)  # gloo wants equal dimensions
        return out


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """One rank's groups. World rank r is rank r mod tp_size of its TP group; experts lie over the whole world."""

    tp: RankGroup = ONE_RANK
    """Ranks that share attention, dense MLPs and the vocabulary."""
    moe: RankGroup = ONE_RANK
    """All ranks: EP rank r // moe_tp, and shard r mod moe_tp of each of its experts."""


def process_groups(parallel: ParallelConfig, device: torch.device | str) -> ParallelGroups:
    """The groups of this process in the default process group; a collective call where ranks have to make a group.

    Every group has sent something on return: NCCL sets up a communicator at its first use, which no graph can capture.
    Raises `LabError` where the config needs ranks and there are none, or another number of them.
    """
    if parallel.world_size == 1:
        return ParallelGroups()
    if not dist.is_available() or not dist.is_initialized():
        wants = f"tp_size={parallel.tp_size}" if parallel.tp_size > 1 else f"ep_size={parallel.ep_size}"
        raise LabError(
            f"{wants} needs a process group of {parallel.world_size} ranks, and there is none; lab.run starts them."
        )
    if dist.get_world_size() != parallel.world_size:
        raise LabError(
            f"tp_size={parallel.tp_size} and ep_size={parallel.ep_size} need {parallel.world_size} ranks, and "
            f"{dist.get_world_size()} were started."
        )
    world = dist.group.WORLD
    assert world is not None
    moe = ProcessRanks(world)
    groups = ParallelGroups(tp=_tp_ranks(parallel, moe), moe=moe)
    for group in (groups.tp, groups.moe):
        group.all_reduce(torch.zeros(1, device=device))
    return groups


def _tp_ranks(parallel: ParallelConfig, world: ProcessRanks) -> RankGroup:
    """This rank's TP group: none at TP1, the world itself where it is all of it, else a group for each replica."""
    if parallel.tp_size == 1:
        return ONE_RANK
    if parallel.tp_size == world.size:
        return world
    mine = None
    for first in range(0, world.size, parallel.tp_size):
        members = list(range(first, first + parallel.tp_size))
        group = dist.new_group(members, timeout=TIMEOUT)  # every rank takes part in making every group
        if world.rank in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = ProcessRanks(group)
    assert mine is not None
    return mine
