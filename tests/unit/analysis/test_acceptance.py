"""Accept length over prompts, and loops in generated text."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dspark_lab.analysis.acceptance import LOOP_SHARE, accept_length, bootstrap_ratio, by_position, loop_share


def test_loops_are_found_and_prose_is_none():
    words = list(b"In the beginning was the word, and nothing else of it was ever said twice over here.")
    assert loop_share(words) == 0
    looping = words + list(b"what is thine heart? ") * 6
    assert loop_share(looping) == pytest.approx(5 * 21 / len(looping), abs=0.02)
    assert loop_share(list(b"x" * 64)) == pytest.approx(63 / 64)
    assert loop_share(list(b"a" + b" " * 16 + b"b" + b" " * 16 + b"cdefghij")) < LOOP_SHARE
    assert loop_share([]) == 0


def test_a_long_period_counts_once_it_is_whole():
    text = list(range(100))
    assert loop_share(text + text) == 0.5
    assert loop_share(text + text[:60]) == 0


def test_intervals_are_over_prompts():
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(60):
        rounds = rng.integers(5, 30, 20)
        tokens = rng.poisson(3.0 * rounds)
        found = bootstrap_ratio(tokens, rounds, seed=trial)
        assert found.low < found.mean < found.high
        inside += found.low <= 3.0 <= found.high
    assert 50 <= inside <= 60
    alone = bootstrap_ratio(np.array([12]), np.array([4]))
    assert (alone.mean, alone.n) == (3.0, 1)
    assert np.isnan(alone.low)


def test_positions_add_up_to_the_length():
    rows = pd.DataFrame(
        {"num_rounds": [4, 5], "num_tokens": [4 + 6, 5 + 4], "accepted": [[1, 1, 1, 1], [2, 2, 1, 0]]},
    )  # 0·1 + 1 + 2 + 3 = 6 accepted drafts, and 4
    positions = by_position(rows)
    assert [p.mean for p in positions] == pytest.approx([6 / 9, 3 / 9, 1 / 9])
    assert accept_length(rows).mean == pytest.approx(1 + sum(p.mean for p in positions))
    assert by_position(rows[:0]) == []
