"""Figures on schedules: what is drawn is what tables and rules say."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.engine.generate import Generated
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import StepTable
from dspark_lab.plan.schedule import survival


def made(committed: list[int], verified: list[int]) -> Generated:
    return Generated(tokens=[1], acceptance_lengths=committed, proposal_lengths=verified)


def test_costs_as_measured_and_as_the_scheduler_reads_them():
    profile = lab.SpsProfile(
        requests=(1, 1, 2, 2), tokens=(1, 2, 2, 4), seconds=(0.010, 0.012, 0.014, 0.018), block_size=1,
        environment={"device_name": "a device", "protocol": {"num_steps": 3, "spread_pct": 5.0}},
    )  # fmt: skip
    costs = profile.additive()
    figure = lab.plot.step_costs(profile, costs)
    by_name = {t.name: t for t in figure.data}
    assert list(by_name["2 requests, measured"].x) == [2, 4]
    assert list(by_name["2 requests, measured"].y) == pytest.approx([14, 18])
    read = by_name["1 request, as the scheduler reads it"]
    assert list(read.y) == pytest.approx(1e3 * costs.seconds_at(1, [1, 2]))
    assert "a device" in figure.layout.title.text
    assert "scatter by 5 %" in figure.layout.title.text
    assert len(lab.plot.step_costs(profile).data) == 2


def test_the_worth_of_a_budget_in_the_papers_example():
    chances = survival(np.array([[0.9, 0.9], [0.5, 0.5]]))
    step = StepTable(tokens=(2, 3, 4, 5, 6), seconds=(0.010, 0.015, 0.015, 0.015, 0.015))
    figure = lab.plot.budget_worth(chances, {"step": step})
    line, best, stopped = figure.data
    assert list(line.y) == pytest.approx([200, 2.9 / 0.015, 3.71 / 0.015, 4.21 / 0.015, 4.46 / 0.015])
    assert (best.x[0], best.marker.symbol) == (4, "circle-open")
    assert (stopped.x[0], stopped.y[0]) == (0, pytest.approx(200))
    assert "No cost table" in lab.plot.budget_worth(chances, {}).layout.annotations[0].text


def test_lengths_are_means_over_the_requests_that_take_part():
    figure = lab.plot.verify_lengths({"static": [made([3, 1], [2, 2]), made([1], [0])]}, label="live")
    (line,) = figure.data
    assert list(line.y) == [2.0, 3.0]  # (3 + 1) / 2, then the first request alone; the anchor counts
    assert line.name == "static: 71% of verified rows kept"  # 5 of 7
    with pytest.raises(LabError, match="'empty' has no rounds"):
        lab.plot.verify_lengths({"empty": [made([], [])]})


def test_points_above_the_line_pay():
    table = pd.DataFrame({"batch_size": [1, 8], "break_even": [2.0, 4.0], "accept_length": [5.0, 3.0]})
    figure = lab.plot.break_even({"one": table, "two": table.assign(point=["a", "b"])}, label="recorded")
    line = figure.data[0]
    assert list(line.x) == list(line.y)
    assert line.x[1] > 5
    points = {t.name: t for t in figure.data if t.mode == "markers+text"}
    assert list(points["one"].text) == ["batch 1", "batch 8"]
    assert list(points["two"].text) == ["a", "b"]
    assert list(points["one"].customdata) == [2.5, 0.75]
    assert "No pair" in lab.plot.break_even({}).layout.annotations[0].text
