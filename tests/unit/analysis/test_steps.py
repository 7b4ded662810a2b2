"""Steps with their parts side by side."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_lab.analysis.breakdown import PARTS, breakdown
from dspark_lab.analysis.steps import COLUMNS, step_parts
from dspark_lab.trace import open_trace


def test_parts_stand_beside_the_period(h200):
    source = open_trace(h200 / "tp2_bs1_hw0_none_rank0.json.gz")
    table = step_parts(source)
    assert list(table.columns) == list(COLUMNS)
    assert table[[f"{p}_us" for p in PARTS]].sum(axis=1).to_numpy() == pytest.approx(table["period_us"].to_numpy())
    assert table["compute_us"].to_numpy() * 1000 == pytest.approx(breakdown(source)["compute_ns"].to_numpy())


def test_withheld_parts_are_no_number(hostile):
    table = step_parts(hostile / "step_collapse")
    assert table["withheld"].ne("").all()
    assert np.isnan(table[[f"{p}_us" for p in PARTS]].to_numpy()).all()
