"""Experts onto ranks by their load, and the least that any placement could reach. Pure functions of one layer's loads."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

MAX_EXCHANGES = 2000
MAX_IDLE = 8
NEAR = 1.001
"""Of the bound: near enough to look no further."""


def balanced_slots(load: Sequence[float], ep_size: int, num_redundant: int = 0) -> list[list[int]]:
    """[ep_size][num_local] logical experts by rank, for ``load`` [num_experts]; ranks hold equally many.

    Copies of the busiest experts are not always what packs best, so where they miss the bound, fewer of the redundant
    experts go there and the rest to the lightest.
    """
    weights = np.asarray(load, dtype=np.float64)
    bound = lower_bound(load, ep_size, num_redundant)
    best, best_slots = np.inf, []
    for num_idle in range(min(num_redundant, MAX_IDLE) + 1):
        num_copies = _with_idle(copies_of(weights, num_redundant - num_idle, ep_size), weights, num_idle, ep_size)
        logical = np.repeat(np.arange(len(weights)), num_copies)
        items = np.repeat(weights / num_copies, num_copies)
        ranks = _exchange(_pack(items, logical, ep_size, len(items) // ep_size), items, logical)
        busiest = max(float(items[rank].sum()) for rank in ranks)
        if busiest < best:
            best, best_slots = busiest, [sorted(int(logical[i]) for i in rank) for rank in ranks]
        if best <= NEAR * bound:
            break
    return best_slots


def _with_idle(num_copies: np.ndarray, weights: np.ndarray, num_idle: int, ep_size: int) -> np.ndarray:
    """``num_idle`` more copies, of the lightest experts, at most one a rank."""
    num = num_copies.copy()
    for e in np.argsort(weights, kind="stable"):
        more = min(num_idle, ep_size - int(num[e]))
        num[e] += more
        num_idle -= more
    return num


def copies_of(load: Sequence[float] | np.ndarray, num_redundant: int, ep_size: int) -> np.ndarray:
    """[num_experts] copies of each expert: each redundant one goes to the expert whose copies are busiest, at most one a rank.

    No other choice has a smaller largest copy.
    """
    weights = np.asarray(load, dtype=np.float64)
    num = np.ones(len(weights), dtype=np.int64)
    heap = [(-w, e) for e, w in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(num_redundant):
        while True:
            _, e = heapq.heappop(heap)
            if num[e] < ep_size:
                break
        num[e] += 1
        heapq.heappush(heap, (-weights[e] / num[e], e))
    return num


def lower_bound(load: Sequence[float], ep_size: int, num_redundant: int = 0) -> float:
    """A load that the busiest rank has at least, under any placement of ``num_redundant`` redundant experts.

    The largest of: the mean over ranks; the largest copy; and, without redundant experts, what must lie beside the largest
    experts, since every rank holds ``n = num_experts / ep_size``: for any i, either the i largest are on i ranks, which take
    i·(n − 1) others, at least the smallest; or two of them share a rank.
    """
    weights = np.sort(np.asarray(load, dtype=np.float64))[::-1]
    mean = float(weights.sum()) / ep_size
    if num_redundant:
        return max(mean, float((weights / copies_of(weights, num_redundant, ep_size)).max()))
    n = len(weights) // ep_size
    rising, best = np.concatenate([[0.0], weights[::-1].cumsum()]), mean
    for i in range(1, min(ep_size, len(weights)) + 1):
        beside = rising[i * (n - 1)]
        apart = max(weights[i - 1] + beside / i, (weights[:i].sum() + beside) / i)
        shared = weights[i - 1] + weights[i - 2] + rising[n - 2] if i > 1 and n > 1 else np.inf
        best = max(best, float(min(apart, shared)))
    return best


def _pack(items: np.ndarray, logical: np.ndarray, ep_size: int, num_local: int) -> list[list[int]]:
    """Items, the heaviest first, each to the lightest rank with a free place and no copy of the same expert."""
    ranks: list[list[int]] = [[] for _ in range(ep_size)]
    total = np.zeros(ep_size)
    held: list[set[int]] = [set() for _ in range(ep_size)]
    for i in np.argsort(-items, kind="stable"):
        free = [r for r in range(ep_size) if len(ranks[r]) < num_local]
        fresh = [r for r in free if int(logical[i]) not in held[r]]
        r = min(fresh or free, key=lambda r: total[r])
        ranks[r].append(int(i))
        held[r].add(int(logical[i]))
        total[r] += items[i]
    return ranks


def _exchange(ranks: list[list[int]], items: np.ndarray, logical: np.ndarray) -> list[list[int]]:
    """Exchanges a pair between the busiest rank and another one while that lowers the larger of the two."""
    table = np.array(ranks)
    total = items[table].sum(axis=1)
    for _ in range(MAX_EXCHANGES):
        busiest = int(total.argmax())
        others = np.array([r for r in range(len(table)) if r != busiest])
        if not len(others):
            break
        given, taken = items[table[busiest]], items[table[others]]
        moved = given[None, :, None] - taken[:, None, :]  # [other, mine, theirs]
        larger = np.maximum(total[busiest] - moved, total[others][:, None, None] + moved)
        larger[_twins(table, others, busiest, logical)] = np.inf
        best = int(larger.argmin())
        if larger.flat[best] >= total[busiest] * (1 - 1e-9):
            break
        o, mine, theirs = np.unravel_index(best, larger.shape)
        other, by = int(others[o]), float(moved[o, mine, theirs])
        table[busiest, mine], table[other, theirs] = table[other, theirs], table[busiest, mine]
        total[busiest] -= by
        total[other] += by
    return table.tolist()


def _twins(table: np.ndarray, others: np.ndarray, busiest: int, logical: np.ndarray) -> np.ndarray:
    """[other, mine, theirs] where an exchange would lay two copies of one expert on a rank."""
    mine, theirs = logical[table[busiest]], logical[table[others]]
    there = (mine[None, :, None] == theirs[:, None, :]).any(axis=2)  # [other, mine]
    here = (theirs[:, :, None] == mine[None, None, :]).any(axis=2)  # [other, theirs]
    return there[:, :, None] | here[:, None, :]
