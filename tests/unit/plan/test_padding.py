"""The predicate, buckets and local counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.errors import LabError
from dspark_lab.plan.padding import bucket_for, enable_num_token_non_padded, local_counts


@pytest.mark.parametrize(
    ("toggles", "expected"),
    [
        ({}, False),
        ({"ep_size": 2}, True),
        ({"ep_size": 8}, True),
        ({"tp_size": 4}, False),
        ({"attn_dp": 2}, False),
        ({"moe_dp": 2, "tp_size": 2}, False),
    ],
)
def test_predicate_is_ep_size_alone(toggles, expected):
    assert enable_num_token_non_padded(ParallelConfig(**toggles)) is expected


@pytest.mark.parametrize(("batch_size", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8)])
def test_bucket_is_the_smallest_that_holds(batch_size, bucket):
    assert bucket_for(batch_size, (8, 1, 4)) == bucket


def test_no_bucket_is_named():
    with pytest.raises(LabError, match=r"batch_size=9 .* 8"):
        bucket_for(9, (1, 4, 8))
    with pytest.raises(LabError, match="batch_size=1"):
        bucket_for(1, ())


@pytest.mark.parametrize(
    ("g", "w", "t", "expected"),
    [
        (5, 8, 2, [4, 1]),
        (3, 8, 4, [2, 1, 0, 0]),
        (8, 8, 4, [2, 2, 2, 2]),
        (0, 8, 4, [0, 0, 0, 0]),
        (6, 24, 4, [6, 0, 0, 0]),
        (7, 7, 1, [7]),
    ],
)
def test_local_counts(g, w, t, expected):
    assert local_counts(g, w, t) == expected


@given(st.integers(1, 16), st.integers(0, 40), st.data())
def test_local_counts_add_up(t, chunk, data):
    g = data.draw(st.integers(0, chunk * t))
    counts = local_counts(g, chunk * t, t)
    assert len(counts) == t
    assert sum(counts) == g
    assert all(0 <= c <= chunk for c in counts)
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("g", "w", "t"), [(7, 7, 2), (9, 8, 2), (-1, 8, 2), (1, 8, 0)])
def test_local_counts_refuse(g, w, t):
    with pytest.raises(LabError):
        local_counts(g, w, t)
