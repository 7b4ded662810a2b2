"""`host_work` and `launch_lead`: slopes and leads that are known, on runs and captures made by hand, and on those that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.runs.record import Run
from dspark_lab.view import sweeps
from tests.unit.view.conftest import capture, measured


def at(alloc: str, us: float, ms: float, **more: Any) -> Run:
    return measured(alloc, ms=ms, config=lab.preset("tiny", alloc=alloc, host_work_us=us), **more)


@pytest.fixture
def sweep() -> list[Run]:
    grown = [at("blocking", us, 2.0 + us / 1e3) for us in (0.0, 500.0, 1000.0)]
    return [*grown, *(at("none", us, 2.0) for us in (0.0, 500.0, 1000.0)), at("pinned", 0.0, 2.0)]


def test_slopes_are_microseconds_of_step_a_microsecond(sweep: list[Run]) -> None:
    slopes = sweeps.host_work_slopes(sweep)
    assert list(slopes) == ["none", "blocking"]  # pinned has one value only
    assert slopes["blocking"].mean == pytest.approx(1.0)
    assert slopes["none"].mean == pytest.approx(0.0, abs=1e-6)
    assert slopes["blocking"].low <= 1.0 <= slopes["blocking"].high


def test_a_point_a_process_and_the_slope_in_the_legend(sweep: list[Run]) -> None:
    figure = lab.plot.host_work(sweep)
    points = [t for t in figure.data if t.mode == "markers"]
    assert [len(t.x) for t in points] == [9, 9]
    said = [t.name for t in figure.data if t.mode == "lines" and t.showlegend is None]
    assert said[1].startswith("blocking: +1.00 ± 0.00 µs a µs")
    title = figure.layout.title.text
    assert "unprofiled" in title
    assert "at one value only: pinned" in title


def test_intervals_only_of_three_processes_or_more() -> None:
    few = [at("none", us, 2.0, num_processes=2) for us in (0.0, 500.0)]
    assert not [t for t in lab.plot.host_work(few).data if t.line.width == 6]
    many = [at("none", us, 2.0, num_processes=3) for us in (0.0, 500.0)]
    assert len([t for t in lab.plot.host_work(many).data if t.line.width == 6]) == 2


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([], "No unprofiled steps"),
        ([at("none", 0.0, 2.0)], "one value of host_work_us only"),
        ([at("none", 0.0, 2.0), measured("none", config=lab.preset("tiny", batch_size=2, alloc="none"))], "batch_size"),
    ],
)
def test_what_cannot_be_drawn_is_said(runs: list[Run], why: str) -> None:
    assert why in lab.plot.host_work(runs).layout.annotations[0].text.replace("<br>", " ")


def test_a_slope_without_replicates_has_no_interval() -> None:
    runs = [at("none", us, 2.0 + us / 1e3, num_processes=1) for us in (0.0, 500.0)]
    slope = sweeps.host_work_slopes(runs)["none"]
    assert slope.mean == pytest.approx(1.0)
    assert "±" not in lab.plot.host_work(runs).data[0].name


def test_leads_are_those_of_the_steps(traces: dict[str, Any]) -> None:
    table = sweeps.launch_lead_table(traces)
    for name, trace in traces.items():
        of = table[table["name"] == name]
        assert list(of["launch_lead_us"]) == list(trace.steps()["launch_lead_us"].iloc[2:])
    medians = table.groupby("name")["launch_lead_us"].median()
    assert medians.to_dict() == pytest.approx({"none": 760.0, "blocking": 10.0})  # start - end of the launch call


def test_zero_is_marked_and_the_label_says_profiled(runs: list[Run]) -> None:
    figure = lab.plot.launch_lead([*runs, measured("non_blocking")])
    zero = [s for s in figure.layout.shapes if s.type == "line"]
    assert [(s.y0, s.y1) for s in zero] == [(0, 0)]
    assert list(figure.layout.xaxis.ticktext) == ["none", "blocking"]
    title = figure.layout.title.text
    assert ", profiled" in title
    assert "unprofiled" not in title
    assert "no capture of: non_blocking" in title


def test_captures_are_told_apart_by_host_work(tmp_path: Path) -> None:
    path = capture(tmp_path)
    figure = lab.plot.launch_lead([at("none", us, 2.0, traces=(path,)) for us in (600.0, 0.0)])
    assert list(figure.layout.xaxis.ticktext) == ["none<br>host work 0 µs", "none<br>host work 600 µs"]
    alike = lab.plot.launch_lead([measured("none", traces=(path,), name=n) for n in ("first", "second")])
    assert list(alike.layout.xaxis.ticktext) == ["first", "second"]


def test_without_a_device_there_is_no_lead(tmp_path: Path) -> None:
    said = lab.plot.launch_lead([measured("none", traces=(capture(tmp_path, gpu=False),))])
    assert "no lead to show" in said.layout.annotations[0].text.replace("<br>", " ")
    assert "No capture" in lab.plot.launch_lead([measured("none")]).layout.annotations[0].text


def test_recorded_host_work_is_exposed_by_blocking_only() -> None:
    runs = [r for s in ("small", "small-hostwork") for r in lab.recorded_runs(sheet=s, batch_size=1)]
    slopes = sweeps.host_work_slopes(runs)
    assert slopes["blocking"].mean == pytest.approx(1.0, abs=0.05)
    assert slopes["none"].mean == pytest.approx(0.0, abs=0.02)
    assert isinstance(sweeps.host_work_table(runs), pd.DataFrame)
    with pytest.raises(lab.LabError, match=r"runs differ in ep_size \(2, 1\)"):
        sweeps.host_work_table([*lab.recorded_runs(sheet="ep2"), *runs])
