"""Which rank holds which expert. Logical ids are the model's, physical ids count over ranks: ``rank * num_local + local``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark_lab.errors import LabError, unknown


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Expert → rank and place there. Every rank holds the same number of experts."""

    ep_size: int
    rank_of: tuple[int, ...]
    """[num_experts] the rank that holds each logical expert."""
    slot_of: tuple[int, ...]
    """[num_experts] its index among that rank's experts."""

    @property
    def num_experts(self) -> int:
        return len(self.rank_of)

    @property
    def num_local(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size

    @property
    def logical_to_physical(self) -> tuple[int, ...]:
        """[num_experts] physical id of each logical expert; a rank's experts are a contiguous range of physical ids."""
        return tuple(rank * self.num_local + slot for rank, slot in zip(self.rank_of, self.slot_of, strict=True))

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Logical ids of ``rank``'s experts, in the order of their local index."""
        mine = [(slot, e) for e, (r, slot) in enumerate(zip(self.rank_of, self.slot_of, strict=True)) if r == rank]
        return tuple(e for _, e in sorted(mine))


def contiguous(num_experts: int, ep_size: int) -> Placement:
    """Rank 0 holds the first ``num_experts / ep_size`` experts, and so on."""
    num_local = _num_local(num_experts, ep_size)
    return _placement([e // num_local for e in range(num_experts)], ep_size)


def round_robin(num_experts: int, ep_size: int) -> Placement:
    """Expert e on rank ``e % ep_size``."""
    _num_local(num_experts, ep_size)
    return _placement([e % ep_size for e in range(num_experts)], ep_size)


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {"contiguous": contiguous, "round_robin": round_robin}


def place(name: str, num_experts: int, ep_size: int) -> Placement:
    """The placement called ``name``. Raises `LabError` on an unknown name or where ``ep_size`` does not divide."""
    if name not in PLACEMENTS:
        raise unknown("placement", name, PLACEMENTS)
    return PLACEMENTS[name](num_experts, ep_size)


def _num_local(num_experts: int, ep_size: int) -> int:
    if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
        raise LabError(f"ep_size={ep_size} does not divide num_experts={num_experts}; choose a divisor.")
    return num_experts // ep_size


def _placement(rank_of: Sequence[int], ep_size: int) -> Placement:
    filled = [0] * ep_size
    slot_of = []
    for rank in rank_of:
        slot_of.append(filled[rank])
        filled[rank] += 1
    return Placement(ep_size=ep_size, rank_of=tuple(rank_of), slot_of=tuple(slot_of))
