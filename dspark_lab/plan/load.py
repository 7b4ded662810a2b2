"""Loads of experts: made ones to try placements on, what a placement makes of a load, and who sends how many rows to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_lab.errors import LabError, unknown
from dspark_lab.plan.balance import lower_bound
from dspark_lab.plan.placement import Placement

Loads = Sequence[Sequence[float]]
"""[num_layers][num_experts] rows of each expert in each layer."""


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """Rows of the busiest rank over the mean of the ranks, layer by layer; 1 is perfect."""

    by_layer: tuple[float, ...]
    bound_by_layer: tuple[float, ...]
    """What no placement with as many redundant experts is below; see `balance.lower_bound`."""

    @property
    def mean(self) -> float:
        """Averaged over layers: ranks wait for each other in every layer, so sums over layers would hide it."""
        return sum(self.by_layer) / len(self.by_layer)

    @property
    def bound(self) -> float:
        return sum(self.bound_by_layer) / len(self.bound_by_layer)


def imbalance(loads: Loads, placements: Sequence[Placement]) -> Imbalance:
    """Of ``placements``, one a layer, under ``loads`` [num_layers][num_experts]; copies of an expert share its rows evenly."""
    if len(loads) != len(placements) or not len(loads):
        raise LabError(f"loads have {len(loads)} layers and there are {len(placements)} placements; one a layer.")
    ratios, bounds = [], []
    for load, p in zip(loads, placements, strict=True):
        ranks = rank_loads(load, p)
        mean = float(ranks.mean())
        ratios.append(float(ranks.max()) / mean if mean else 1.0)
        bounds.append(lower_bound(load, p.ep_size, p.num_redundant) / mean if mean else 1.0)
    return Imbalance(by_layer=tuple(ratios), bound_by_layer=tuple(bounds))


def rank_loads(load: Sequence[float], placement: Placement) -> np.ndarray:
    """[ep_size] rows of each rank in a layer with ``load`` [num_experts]."""
    share = np.asarray(load, dtype=np.float64) / np.array([len(c) for c in placement.copies])
    return share[list(placement.physical_to_logical)].reshape(placement.ep_size, placement.num_local).sum(axis=1)


def traffic(topk_ids: np.ndarray, source: Sequence[int], placement: Placement) -> np.ndarray:
    """[ep_size, ep_size] rows that rank i sends to rank j when row t, with ``topk_ids`` [T, k], starts on rank ``source[t]``.

    A row goes to a rank once, however many of its experts are there; the diagonal stays at home. −1 goes nowhere. Copies
    are chosen as `choose_copy` does.
    """
    n, out = placement.ep_size, np.zeros((placement.ep_size, placement.ep_size), dtype=np.int64)
    for row, (ids, start) in enumerate(zip(np.asarray(topk_ids), source, strict=True)):
        ranks = {choose_copy(placement, int(e), row) // placement.num_local for e in ids if e >= 0}
        for r in ranks:
            out[start, r % n] += 1
    return out


def choose_copy(placement: Placement, expert: int, row: int) -> int:
    """Physical id that row number ``row`` uses of ``expert``: its copies in turn, so every rank chooses alike without asking."""
    copies = placement.copies[expert]
    return copies[row % len(copies)]


# -- made loads ------------------------------------------------------------------------------------------------


def uniform(num_layers: int, num_experts: int) -> np.ndarray:
    """Every expert is as popular as the next."""
    return np.ones((num_layers, num_experts))


def zipf(num_layers: int, num_experts: int, s: float = 1.0) -> np.ndarray:
    """Popularity 1 / rank^s; which expert has which rank differs by layer."""
    order = [np.random.default_rng([layer, num_experts]).permutation(num_experts) for layer in range(num_layers)]
    return (1.0 / (np.array(order) + 1.0)) ** s


def one_hot(num_layers: int, num_experts: int) -> np.ndarray:
    """One expert a layer, another in each, takes part in nearly every row."""
    p = uniform(num_layers, num_experts)
    p[np.arange(num_layers), np.arange(num_layers) % num_experts] = 1e3 * num_experts
    return p


def adversarial(num_layers: int, num_experts: int) -> np.ndarray:
    """Balanced in the sum over layers, skewed in each: an eighth of the experts, side by side, is 8 times as popular."""
    block = max(num_experts // 8, 1)
    hot = (np.arange(num_experts) // block)[None, :] == (np.arange(num_layers) % (num_experts // block))[:, None]
    return np.where(hot, 8.0, 1.0)


LOADS: dict[str, Callable[[int, int], np.ndarray]] = {
    "uniform": uniform,
    "zipf": zipf,
    "one_hot": one_hot,
    "adversarial": adversarial,
}


def route(popularity: np.ndarray, topk: int, num_rows: int, seed: int = 0) -> np.ndarray:
    """[num_layers, num_rows, topk] expert ids: each row draws ``topk`` different experts, one after the other, by ``popularity``.

    Drawn as the first arrivals of exponential clocks with those rates. No expert is in a row twice, so none has more
    than 1/topk of all hits: a router's load is flatter than the popularity behind it.
    """
    num_layers, num_experts = popularity.shape
    if not 1 <= topk <= num_experts:
        raise LabError(f"topk={topk} is not within 1 to {num_experts} experts.")
    rng = np.random.default_rng(seed)
    ids = np.empty((num_layers, num_rows, topk), dtype=np.int64)
    for layer in range(num_layers):
        arrivals = rng.exponential(size=(num_rows, num_experts)) / popularity[layer]
        ids[layer] = np.argpartition(arrivals, topk - 1, axis=1)[:, :topk]
    return ids


def count(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """[num_layers, num_experts] rows of each expert in ``topk_ids`` [num_layers, T, k]; −1 is dropped before counting."""
    flat = np.asarray(topk_ids).reshape(len(topk_ids), -1)
    return np.array([np.bincount(row[row >= 0], minlength=num_experts) for row in flat])


def made_load(
    name: str, num_layers: int, num_experts: int, topk: int, *, num_rows: int = 4096, seed: int = 0
) -> np.ndarray:
    """[num_layers, num_experts] counted rows of a made load: ``uniform``, ``zipf``, ``one_hot`` or ``adversarial``."""
    if name not in LOADS:
        raise unknown("load", name, LOADS)
    return count(route(LOADS[name](num_layers, num_experts), topk, num_rows, seed), num_experts)
