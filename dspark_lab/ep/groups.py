"""Groups of ranks and what they say to each other: the one place that knows torch.distributed's process groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.control import WAIT_LIMIT_S, Control
from dspark_lab.errors import LabError


class RankGroup(Protocol):
    """Ranks that share a layer. Collectives of fixed shapes never wait for the host, so graphs may hold them."""

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

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """[*shape]: block ``rank`` of ``tensor`` [size, *shape], summed over the ranks."""
        ...

    def all_to_all(self, tensor: Tensor, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
        """Rows of ``tensor`` [R, …], the first ``send[0]`` to rank 0 and so on, for ``receive[r]`` rows from each rank r.

        None: equal parts both ways, which is the form that graphs may hold.
        """
        ...


class OneRank:
    """A group of one: nothing is sent."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor[0]

    def all_to_all(self, tensor: Tensor, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
        return tensor


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

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        if dist.get_backend(self.group) == "gloo":  # has none that takes every dtype
            return self.all_reduce(tensor.contiguous())[self.rank]
        out = tensor.new_empty(tensor.shape[1:])
        dist.reduce_scatter_tensor(out, tensor.contiguous(), group=self.group)
        return out

    def all_to_all(self, tensor: Tensor, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
        num_rows = tensor.shape[0] if receive is None else sum(receive)
        out = tensor.new_empty(num_rows, *tensor.shape[1:])
        dist.all_to_all_single(out, tensor.contiguous(), receive, send, group=self.group)
        return out


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """One rank's groups. World rank r is rank r mod tp_size of its TP group; experts lie over the whole world.

    Ranks of one attention replica are neighbours: rank r serves the requests of replica r // rows.size.
    """

    tp: RankGroup = ONE_RANK
    """Ranks that share attention, dense MLPs and the vocabulary."""
    moe: RankGroup = ONE_RANK
    """All ranks: EP rank r // moe_tp, and shard r mod moe_tp of each of its experts."""
    rows: RankGroup = ONE_RANK
    """Ranks that hold the same rows: world / attn_dp, its TP group or several copies of it."""
    control: Control | None = None
    """What all ranks tell each other on the host; None for one rank."""

    def limit_waits(self, limit_s: float) -> None:
        """Bounds every wait from now on: the host's, and those inside collectives. Setting up may take longer."""
        if self.control is not None:
            self.control.limit_s = limit_s
        for group in (self.tp, self.moe, self.rows):
            if isinstance(group, ProcessRanks):
                _set_pg_timeout(timedelta(seconds=limit_s), group.group)

    @property
    def replica(self) -> int:
        """Which attention replica this rank is of: 0 to attn_dp − 1."""
        return self.moe.rank // self.rows.size


def process_groups(parallel: ParallelConfig, device: torch.device | str) -> ParallelGroups:
    """The groups of this process in the default process group; a collective call where ranks have to make a group.

    Every group has sent something on return: NCCL sets up a communicator at its first use, which no graph can capture.
    Raises `LabError` where the config needs ranks and there are none, or another number of them.
    """
    if parallel.world_size == 1:
        return ParallelGroups()
    if not dist.is_available() or not dist.is_initialized():
        sizes = {"tp_size": parallel.tp_size, "ep_size": parallel.ep_size, "attn_dp": parallel.attn_dp}
        wants = next(f"{name}={size}" for name, size in sizes.items() if size > 1)
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
    limit = timedelta(seconds=WAIT_LIMIT_S)
    tp = neighbours(parallel.tp_size, moe, limit)
    rows = tp if parallel.rows_ranks == parallel.tp_size else neighbours(parallel.rows_ranks, moe, limit)
    host = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(host, dist.ProcessGroup)
    groups = ParallelGroups(tp=tp, moe=moe, rows=rows, control=Control(host))
    for group in {id(g): g for g in (tp, moe, rows)}.values():
        group.all_reduce(torch.zeros(1, device=device))
    return groups


def neighbours(size: int, world: ProcessRanks, limit: timedelta) -> RankGroup:
    """The group of ``size`` neighbours that this rank is in: none of one, the world itself where it is all of it."""
    if size == 1:
        return ONE_RANK
    if size == world.size:
        return world
    mine = None
    for first in range(0, world.size, size):
        members = list(range(first, first + size))
        group = dist.new_group(members, timeout=limit)  # every rank takes part in making every group
        if world.rank in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = ProcessRanks(group)
    assert mine is not None
    return mine
