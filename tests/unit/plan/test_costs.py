"""Cost tables: look-up by hand, and what is refused."""

from __future__ import annotations

import math

import pytest

from dspark_lab.errors import LabError
from dspark_lab.plan.costs import UNPROFILED, AdditiveTable, StepTable, can_trim

ADDITIVE = {"bias_s": 2.0, "requests": (1, 5), "alpha_s": (0.0, 4.0), "tokens": (1, 3, 11), "theta_s": (0.0, 1.0, 9.0)}


def test_a_step_table_is_read_at_the_probe_below_and_keeps_its_ends() -> None:
    table = StepTable(tokens=(2, 8, 32), seconds=(1.0, 2.0, 5.0))
    assert table.seconds_at(1, [1, 2, 7, 8, 9, 31, 32, 1000]).tolist() == [1, 1, 1, 2, 2, 2, 5, 5]


def test_an_additive_table_is_linear_between_probes_and_keeps_its_ends() -> None:
    table = AdditiveTable(**ADDITIVE)
    assert table.seconds_at(1, [1, 2, 3, 7, 11, 99]).tolist() == pytest.approx([2, 2.5, 3, 7, 11, 11])
    assert table.seconds_at(3, [1]).tolist() == pytest.approx([4])
    assert table.seconds_at(50, [3]).tolist() == pytest.approx([7])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0, "1", None, True])
def test_a_time_is_finite_and_above_zero(bad) -> None:
    with pytest.raises(LabError, match="seconds holds"):
        StepTable(tokens=(1, 2), seconds=(1.0, bad))
    with pytest.raises(LabError, match="bias_s holds"):
        AdditiveTable(**(ADDITIVE | {"bias_s": bad}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": (1, 11, 3)}, "tokens has 3 behind 11"),
        ({"tokens": (1, 3, 3)}, "strictly rise"),
        ({"requests": (0, 5)}, "requests holds 0"),
        ({"requests": (1.5, 5)}, "requests holds 1.5"),
        ({"requests": ()}, "requests is empty"),
        ({"theta_s": (0.0, 1.0)}, "theta_s has 2 values and tokens 3"),
        ({"alpha_s": (0.0, math.nan)}, "alpha_s holds nan"),
        ({"alpha_s": (-3.0, 4.0)}, "above 0"),
    ],
)
def test_a_table_that_is_none_is_refused(change, text) -> None:
    with pytest.raises(LabError, match=text):
        AdditiveTable(**(ADDITIVE | change))


def test_what_can_be_trimmed() -> None:
    assert not can_trim(UNPROFILED, block_size=7, max_requests=256)
    assert not can_trim(
        StepTable(tokens=(1, 100), seconds=(1.0, 2.0)), block_size=5, max_requests=16
    )  # 96 whole blocks
    assert can_trim(StepTable(tokens=(1, 96), seconds=(1.0, 2.0)), block_size=5, max_requests=16)
    assert not can_trim(
        StepTable(tokens=(1, 4), seconds=(2.0, 1.0)), block_size=5, max_requests=16
    )  # cheaper is no reason
    assert can_trim(AdditiveTable(**ADDITIVE), block_size=1, max_requests=1)
