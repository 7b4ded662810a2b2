"""Which steps are meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_lab.errors import LabError
from dspark_lab.trace.span import StepRange, step_number

NUMBERS = np.arange(2, 10)


@pytest.mark.parametrize(
    ("steps", "meant"),
    [
        (None, list(range(2, 10))), (3, [3]), (np.int64(3), [3]), (slice(4, 6), [4, 5]), (slice(None, 4), [2, 3]), (slice(8, None), [8, 9]),
        (range(4, 6), [4, 5]), (slice(4, 6, 1), [4, 5]), (slice(90, 99), []),
    ],
)  # fmt: skip
def test_numbers_and_ranges(steps: Any, meant: list[int]) -> None:
    assert NUMBERS[StepRange.of(steps).holds(NUMBERS)].tolist() == meant


@pytest.mark.parametrize("steps", ["2:4", 2.5, [1, 2], True, slice(0, 6, 2), slice("a", None), slice(2.5, 4), -1, slice(-3, None), slice(5, 2), range(0, 6, 2)])  # fmt: skip
def test_what_names_no_steps(steps: Any) -> None:
    with pytest.raises(LabError, match=r"steps=.*(give one number|is an empty range)"):
        StepRange.of(steps)


def test_it_says_what_there_is() -> None:
    assert (
        str(StepRange(99, 100).none_of(NUMBERS, "rank 0")) == "there is no step 99 in rank 0, which has steps 2 to 9."
    )
    assert "has no steps" in str(StepRange(3, 5).none_of(NUMBERS[:0]))
    with pytest.raises(LabError, match="no step number"):
        step_number(slice(2, 4))
