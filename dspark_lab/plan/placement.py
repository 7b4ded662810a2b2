"""Which rank holds which expert of one MoE layer. Logical ids are the model's, physical ids count over ranks: ``rank * num_local + local``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dspark_lab.errors import LabError, unknown
from dspark_lab.plan.balance import balanced_slots


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The experts of one layer by rank and place there. Every rank holds the same number; an expert may have several copies."""

    ep_size: int
    num_experts: int
    physical_to_logical: tuple[int, ...]
    """[ep_size · num_local] the logical expert at each physical id; a rank's experts are a contiguous range."""

    @property
    def num_local(self) -> int:
        """Experts of one rank, copies included."""
        return len(self.physical_to_logical) // self.ep_size

    @property
    def num_redundant(self) -> int:
        """Copies beyond one of each expert."""
        return len(self.physical_to_logical) - self.num_experts

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """[num_experts] physical ids of each logical expert, in order; the first is the one that `logical_to_physical` names."""
        at: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, logical in enumerate(self.physical_to_logical):
            at[logical].append(physical)
        return tuple(map(tuple, at))

    @property
    def logical_to_physical(self) -> tuple[int, ...]:
        """[num_experts] physical id of the first copy of each logical expert."""
        return tuple(ids[0] for ids in self.copies)

    @property
    def rank_of(self) -> tuple[int, ...]:
        """[num_experts] the rank of the first copy of each logical expert."""
        return tuple(p // self.num_local for p in self.logical_to_physical)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Logical ids of ``rank``'s experts, in the order of their local index."""
        return self.physical_to_logical[rank * self.num_local : (rank + 1) * self.num_local]


def contiguous(num_experts: int, ep_size: int, num_redundant: int = 0) -> Placement:
    """Rank 0 holds the first ``num_local`` experts, and so on; redundant places hold the first experts once more."""
    num_local = slots_of_a_rank(num_experts, ep_size, num_redundant)
    return _placement([[rank * num_local + i for i in range(num_local)] for rank in range(ep_size)], num_experts)


def round_robin(num_experts: int, ep_size: int, num_redundant: int = 0) -> Placement:
    """Expert e on rank ``e % ep_size``; redundant places go on counting."""
    num_local = slots_of_a_rank(num_experts, ep_size, num_redundant)
    return _placement([[i * ep_size + rank for i in range(num_local)] for rank in range(ep_size)], num_experts)


def balanced(load: Sequence[float], ep_size: int, num_redundant: int = 0) -> Placement:
    """Experts with the measured ``load`` [num_experts] spread so that the busiest rank has as little as can be.

    Redundant experts go one by one to the expert whose copies are busiest; then experts are packed greedily, the busiest
    first (both as in DeepSeek's EPLB), and pairs are exchanged while that relieves the busiest rank.
    """
    slots_of_a_rank(len(load), ep_size, num_redundant)
    return _placement(balanced_slots(load, ep_size, num_redundant), len(load))


STATIC: dict[str, Callable[[int, int, int], Placement]] = {"contiguous": contiguous, "round_robin": round_robin}
"""Placements that need no load."""
PLACEMENTS = (*STATIC, "balanced")


def place(
    name: str,
    num_experts: int,
    ep_size: int,
    num_redundant: int = 0,
    *,
    load: Sequence[float] | None = None,
) -> Placement:
    """The placement called ``name`` of one layer; ``load`` [num_experts] is what ``balanced`` spreads.

    Raises `LabError` on an unknown name, where ``ep_size`` does not divide, and for ``balanced`` without a load.
    """
    if name not in PLACEMENTS:
        raise unknown("placement", name, PLACEMENTS)
    if name in STATIC or ep_size == 1:
        return STATIC.get(name, contiguous)(num_experts, ep_size, num_redundant)
    if load is None:
        raise LabError(
            "placement='balanced' needs the load of each expert; lab.run and lab.sweep measure it first, "
            "and plan.load makes one."
        )
    if len(load) != num_experts:
        raise LabError(f"load has {len(load)} experts and the layer has {num_experts}; they are not of one model.")
    return balanced(load, ep_size, num_redundant)


def slots_of_a_rank(num_experts: int, ep_size: int, num_redundant: int = 0) -> int:
    """Experts that each rank holds. Raises `LabError` where they cannot be shared out evenly, or copies have no rank."""
    total = num_experts + num_redundant
    if ep_size < 1 or num_experts < 1 or num_redundant < 0 or total % ep_size:
        with_redundant = f" and num_redundant={num_redundant}" if num_redundant else ""
        raise LabError(
            f"ep_size={ep_size} does not divide num_experts={num_experts}{with_redundant}; choose a divisor."
        )
    if num_redundant > num_experts * (ep_size - 1):
        raise LabError(
            f"num_redundant={num_redundant} is over {num_experts * (ep_size - 1)}: a copy of each of {num_experts} experts "
            f"on each of {ep_size} ranks."
        )
    return total // ep_size


def _placement(slots: Sequence[Sequence[int]], num_experts: int) -> Placement:
    flat = tuple(int(e) % num_experts for rank in slots for e in rank)
    return Placement(ep_size=len(slots), num_experts=num_experts, physical_to_logical=flat)
