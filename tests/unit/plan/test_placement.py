"""Placements: every expert has a place, physical ids of a rank are a range, and balanced ones reach what can be reached."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_lab.errors import LabError
from dspark_lab.plan.balance import copies_of, lower_bound
from dspark_lab.plan.load import LOADS, count, imbalance, made_load, rank_loads, route, traffic
from dspark_lab.plan.placement import PLACEMENTS, STATIC, balanced, contiguous, place, round_robin


def test_contiguous_and_round_robin():
    assert contiguous(8, 2).rank_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert contiguous(8, 2).logical_to_physical == tuple(range(8))
    assert round_robin(6, 2).rank_of == (0, 1, 0, 1, 0, 1)
    assert round_robin(6, 2).experts_of(1) == (1, 3, 5)
    assert round_robin(6, 2).logical_to_physical == (0, 3, 1, 4, 2, 5)


def test_redundant_experts_make_ranks_equal():
    p = contiguous(8, 3, 1)
    assert [p.experts_of(r) for r in range(3)] == [(0, 1, 2), (3, 4, 5), (6, 7, 0)]
    assert p.copies[0] == (0, 8)
    assert p.num_redundant == 1
    assert round_robin(4, 2, 2).experts_of(0) == (0, 2, 0)


@given(st.sampled_from(PLACEMENTS), st.integers(1, 8), st.integers(1, 8), st.integers(0, 6), st.randoms())
def test_every_expert_has_a_place(name, ep_size, num_local, redundant, random):
    num_experts = ep_size * num_local
    redundant = min(redundant, num_experts * (ep_size - 1) // ep_size) * ep_size
    load = [random.randrange(100) for _ in range(num_experts)]
    p = place(name, num_experts, ep_size, redundant, load=load)
    assert p.num_local == num_local + redundant // ep_size
    assert set(p.physical_to_logical) == set(range(num_experts))
    assert sorted(itertools.chain(*p.copies)) == list(range(num_experts + redundant))
    for rank in range(ep_size):
        mine = p.experts_of(rank)
        assert all(rank * p.num_local + i in p.copies[e] for i, e in enumerate(mine))
        if name == "balanced" and not redundant:
            assert len(set(mine)) == len(mine)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_one_rank_leaves_ids_untouched(name):
    assert place(name, 8, 1).logical_to_physical == tuple(range(8))


def test_misfits_are_named():
    with pytest.raises(LabError, match="ep_size=3 does not divide num_experts=8"):
        contiguous(8, 3)
    with pytest.raises(LabError, match=r"placement='round'.*round_robin"):
        place("round", 8, 2)
    with pytest.raises(LabError, match="placement='balanced' needs the load"):
        place("balanced", 8, 2)
    with pytest.raises(LabError, match="load has 4 experts and the layer has 8"):
        place("balanced", 8, 2, load=[1] * 4)
    with pytest.raises(LabError, match="num_redundant=16 is over 8"):
        contiguous(8, 2, 16)
    with pytest.raises(LabError, match=r"load='zipff'.*zipf"):
        made_load("zipff", 1, 8, 2)


def best_of_all(load: list[float], ep_size: int, num_redundant: int) -> float:
    """The busiest rank's load under the best of all placements, by trying all of them."""
    best = float("inf")
    for extra in itertools.combinations_with_replacement(range(len(load)), num_redundant):
        items = [*range(len(load)), *extra]
        share = [load[e] / items.count(e) for e in items]
        for cut in splits(list(range(len(items))), len(items) // ep_size):
            best = min(best, max(sum(share[i] for i in rank) for rank in cut))
    return best


def splits(items: list[int], size: int):
    if not items:
        yield []
        return
    for rest in itertools.combinations(items[1:], size - 1):
        mine = [items[0], *rest]
        for others in splits([i for i in items if i not in mine], size):
            yield [mine, *others]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.sampled_from([(6, 2, 0), (6, 3, 0), (4, 2, 2), (5, 2, 1), (8, 2, 0)]),
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
)
def test_bound_is_one_and_balanced_is_near_the_best(shape, load):
    num_experts, ep_size, redundant = shape
    load = load[:num_experts]
    best = best_of_all(load, ep_size, redundant)
    assert lower_bound(load, ep_size, redundant) <= best + 1e-9
    reached = rank_loads(load, balanced(load, ep_size, redundant)).max()
    assert best - 1e-9 <= reached <= max(1.25 * best, best + 1)


def test_copies_go_to_the_busiest():
    assert copies_of([8.0, 4.0, 1.0, 1.0], 3, 4).tolist() == [3, 2, 1, 1]
    assert copies_of([100.0, 1.0], 2, 2).tolist() == [2, 2]  # at most one a rank


@pytest.mark.parametrize(("redundant", "goal"), [(0, 1.10), (32, 1.01)])
def test_zipf_goal(redundant, goal):
    load = made_load("zipf", 16, 128, 8)
    got = imbalance(load, [balanced(row, 8, redundant) for row in load])
    assert got.bound <= got.mean <= goal
    assert imbalance(load, [contiguous(128, 8)] * 16).mean > 1.5


@pytest.mark.parametrize("name", sorted(LOADS))
@pytest.mark.parametrize(
    ("num_experts", "topk", "ep_size", "redundant"),
    [(128, 8, 8, 0), (128, 8, 8, 32), (64, 6, 2, 0), (64, 6, 8, 16), (8, 2, 4, 0), (8, 2, 2, 2), (256, 8, 32, 0)],
)
def test_other_shapes_are_within_two_percent_of_the_bound(name, num_experts, topk, ep_size, redundant):
    load = made_load(name, 4, num_experts, topk, num_rows=2048)
    got = imbalance(load, [balanced(row, ep_size, redundant) for row in load])
    assert got.mean <= 1.02 * got.bound
    assert all(a >= b - 1e-9 for a, b in zip(got.by_layer, got.bound_by_layer, strict=True))


def test_balanced_in_sum_and_skewed_in_each_layer():
    load = made_load("adversarial", 16, 128, 8)
    of_the_sum = imbalance([load.sum(0)], [contiguous(128, 8)])
    layers = imbalance(load, [contiguous(128, 8)] * 16)
    assert of_the_sum.mean < 1.05  # what a sum over layers would have shown
    assert layers.mean > 3
    assert imbalance(load, [balanced(load.sum(0), 8)] * 16).mean > 1.2  # one placement for all layers does not help
    assert imbalance(load, [balanced(row, 8) for row in load]).mean < 1.02


def test_made_loads_are_routings():
    ids = route(LOADS["one_hot"](2, 8), 2, 500)
    assert ids.shape == (2, 500, 2)
    assert (ids[..., 0] != ids[..., 1]).all()
    got = count(ids, 8)
    assert got.sum(1).tolist() == [1000, 1000]
    assert [row.argmax() for row in got] == [0, 1]
    assert got.max() <= 500  # an expert is in a row once, so a load is flatter than the popularity behind it
    assert count(np.array([[[-1, 7], [7, -1]]]), 8).tolist() == [[0] * 7 + [2]]


def test_traffic_sends_a_row_to_a_rank_once():
    p = contiguous(4, 2)
    ids = np.array([[0, 1], [0, 2], [2, 3], [-1, -1]])
    assert traffic(ids, [0, 0, 1, 1], p).tolist() == [[2, 1], [0, 1]]
    doubled = contiguous(4, 2, 4)  # every expert on every second place: copies in turn, by row
    assert [doubled.copies[0], doubled.experts_of(0)] == [(0, 4), (0, 1, 2, 3)]
    assert traffic(np.array([[0, 1]] * 4), [0] * 4, doubled).tolist() == [[2, 2], [0, 0]]


def test_static_placements_need_no_load():
    assert set(STATIC) == {"contiguous", "round_robin"}
    assert [place(n, 8, 2).num_local for n in STATIC] == [4, 4]
