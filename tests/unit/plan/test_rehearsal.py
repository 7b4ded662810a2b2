"""Rehearsed schedules: exact where it can be worked out by hand, and the scheduler close to the best fixed length."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_lab.errors import LabError
from dspark_lab.plan.costs import StepTable
from dspark_lab.plan.rehearsal import TextPath, deployed, fixed, rehearse, stopping
from dspark_lab.study.regret import schedule_regret

GAMMA = 4


def text(per_draft: float, starts: int = 60, told: float | None = None) -> TextPath:
    """Every draft survives with the same chance; ``told``: what the confidence head says of it."""
    c = per_draft if told is None else told
    return TextPath(
        survival=np.tile(np.cumprod(np.full(GAMMA, per_draft)), (starts, 1)),
        confidence_logits=np.full((starts, GAMMA), np.log(c / (1 - c))),
    )


FLAT = StepTable(tokens=(1,), seconds=(1.0,))
STEEP = StepTable(tokens=tuple(range(1, 200)), seconds=tuple(float(t) for t in range(1, 200)))
RISING = StepTable(tokens=tuple(range(1, 400)), seconds=tuple(10.0 + 0.5 * t for t in range(1, 400)))


@pytest.mark.parametrize("length", range(GAMMA + 1))
def test_a_fixed_length_earns_what_the_formula_says(length: int) -> None:
    made = rehearse([text(0.7)], FLAT, fixed(length), num_requests=20, num_steps=2000, seed=0)
    expected = 1 + sum(0.7**k for k in range(1, length + 1))
    assert made.accept_length == pytest.approx(expected, rel=0.01)
    assert made.verify_len == length + 1
    assert made.tokens_per_s == pytest.approx(20 * expected, rel=0.01)


def test_the_scheduler_verifies_all_where_it_is_free_and_nothing_where_it_never_pays() -> None:
    with pytest.warns(UserWarning, match="NOTHING IS TRIMMED"):
        free = rehearse(
            [text(0.7)], FLAT, deployed(FLAT, block_size=GAMMA, max_requests=4), num_requests=4, num_steps=50, seed=0
        )
    assert free.verify_len == GAMMA + 1
    rule = deployed(STEEP, block_size=GAMMA, max_requests=4)
    dear = rehearse([text(0.7)], STEEP, rule, num_requests=4, num_steps=50, seed=0)
    assert dear.verify_len == 1


def test_texts_that_differ_are_told_apart_by_confidence() -> None:
    """Half of the requests draft well and half badly: one length for all is worse than a length each."""
    texts = [text(0.95), text(0.1)]
    table = schedule_regret(texts, RISING, requests=[16], num_steps=150, num_seeds=4)
    row = table.iloc[0]
    assert row["regret_high_pct"] < 0  # better than any fixed length
    lied = schedule_regret(
        [text(0.95, told=0.1), text(0.1, told=0.95)], RISING, requests=[16], num_steps=150, num_seeds=4
    )
    assert lied.iloc[0]["regret_low_pct"] > 0  # and worse where confidence says the opposite
    assert row["over_none_pct"] > 0


def test_early_stop_is_near_on_a_smooth_table() -> None:
    ours = rehearse([text(0.8)], RISING, stopping(RISING), num_requests=8, num_steps=200, seed=1)
    rule = deployed(RISING, block_size=GAMMA, max_requests=8)
    assert ours.tokens_per_s == pytest.approx(
        rehearse([text(0.8)], RISING, rule, num_requests=8, num_steps=200, seed=1).tokens_per_s, rel=0.03
    )


def test_rules_meet_the_same_luck() -> None:
    args = {"num_requests": 3, "num_steps": 40, "seed": 7}
    assert rehearse([text(0.5)], FLAT, fixed(2), **args) == rehearse([text(0.5)], FLAT, fixed(2), **args)
    assert rehearse([text(0.5)], FLAT, fixed(2), **args) != rehearse([text(0.5)], FLAT, fixed(2), **{**args, "seed": 8})


def test_bad_values_are_named() -> None:
    with pytest.raises(LabError, match="requests holds 0"):
        schedule_regret([text(0.5)], FLAT, requests=[0])
    with pytest.raises(LabError, match="no texts"):
        schedule_regret([], FLAT, requests=[1])
    with pytest.raises(LabError, match="num_seeds=1 is not"):
        schedule_regret([text(0.5)], FLAT, requests=[1], num_seeds=1)
    with pytest.raises(LabError, match="no confidence head"):
        rehearse([TextPath(survival=np.ones((5, 2)))], FLAT, fixed(1), num_requests=1, num_steps=1, seed=0)
