"""Placements: every expert has one place, and physical ids of a rank are a range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_lab.errors import LabError
from dspark_lab.plan.placement import PLACEMENTS, contiguous, place, round_robin


def test_contiguous_and_round_robin():
    assert contiguous(8, 2).rank_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert contiguous(8, 2).logical_to_physical == tuple(range(8))
    assert round_robin(6, 2).rank_of == (0, 1, 0, 1, 0, 1)
    assert round_robin(6, 2).experts_of(1) == (1, 3, 5)
    assert round_robin(6, 2).logical_to_physical == (0, 3, 1, 4, 2, 5)


@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 8), st.integers(1, 8))
def test_every_expert_has_one_place(name, ep_size, num_local):
    p = place(name, ep_size * num_local, ep_size)
    assert p.num_local == num_local
    assert sorted(p.logical_to_physical) == list(range(p.num_experts))
    for rank in range(ep_size):
        mine = p.experts_of(rank)
        assert [p.logical_to_physical[e] for e in mine] == list(range(rank * num_local, (rank + 1) * num_local))
        assert [p.slot_of[e] for e in mine] == list(range(num_local))


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_one_rank_leaves_ids_untouched(name):
    assert place(name, 8, 1).logical_to_physical == tuple(range(8))


def test_misfits_are_named():
    with pytest.raises(LabError, match="ep_size=3 does not divide num_experts=8"):
        contiguous(8, 3)
    with pytest.raises(LabError, match=r"placement='round'.*round_robin"):
        place("round", 8, 2)
