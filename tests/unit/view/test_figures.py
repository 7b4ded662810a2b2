"""Figures as values: widths are durations, colours mean one thing, nothing is too large, nothing empty is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import dspark_lab as lab
from dspark_lab.analysis.latency import compare
from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.trace import open_trace
from dspark_lab.view import figures
from dspark_lab.view.source import one_rank
from dspark_lab.view.theme import COLOURS
from dspark_lab.view.waits import waits_table
from tests.unit.view.conftest import capture, measured


def bars(figure: go.Figure, name: str) -> Any:
    return next(t for t in figure.data if t.type == "bar" and t.name == name)


def test_timeline_widths_are_durations(traces: dict[str, Any]) -> None:
    trace = traces["none"]
    figure = figures.timeline(trace, steps=None)
    drawn = np.concatenate([np.asarray(bars(figure, c).x) for c in ("compute", "communication")])
    work = trace.kernels()
    assert sorted(np.round(drawn * 1e3, 3)) == sorted(np.round(work["dur_us"], 3))
    assert figure.layout.xaxis.type in (None, "linear")
    assert all(t.type == "bar" and t.orientation == "h" for t in figure.data)


def test_colours_mean_one_thing(traces: dict[str, Any]) -> None:
    figure = figures.timeline(traces["none"], steps=None)
    for name in ("compute", "communication", "draft", "verify"):
        assert bars(figure, name).marker.color == COLOURS[name]
    strip = figures.step_strip(traces)
    assert bars(strip, "draft").marker.color == COLOURS["draft"]
    assert bars(strip, "host blocked").marker.pattern.fgcolor == COLOURS["wait"]
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_timeline_shows_the_steps_asked_for(traces: dict[str, Any]) -> None:
    figure = figures.timeline(traces["blocking"], steps=slice(2, 3))
    assert "step 2" in figure.layout.title.text
    assert "profiled" in figure.layout.title.text
    hover = " ".join(bars(figure, "host blocked").hovertext)
    assert "cudaStreamSynchronize" in hover
    assert "#1" in hover


def test_timeline_merges_tiny_kernels_and_says_so(tmp_path: Path) -> None:
    trace = open_trace(capture(tmp_path, steps=50, kernels=500))
    figure = figures.timeline(trace, steps=None)
    assert len(figure.to_json()) < 1_000_000
    assert sum(len(t.x) for t in figure.data if t.type == "bar") <= 4500
    assert "merged" in figure.layout.title.text
    assert "merged" not in figures.timeline(trace, steps=slice(2, 3)).layout.title.text


def test_timeline_marks_what_the_integrity_report_undermines(hostile: Path) -> None:
    figure = figures.timeline(open_trace(hostile / "step_collapse"), steps=None)
    assert "⚠ not given: " in figure.layout.title.text
    said = [a.text for a in figure.layout.annotations]
    assert "⚠ step 6: no device events" in said
    assert any(s.type == "rect" and s.x1 > s.x0 for s in figure.layout.shapes)
    assert "⚠" not in figures.timeline(open_trace(hostile / "ok"), steps=None).layout.title.text


def test_strip_and_waits_mark_a_capture_that_is_not_whole(hostile: Path, h200: Path, tmp_path: Path) -> None:
    whole = (h200 / "trace_blocking.json.gz").read_bytes()
    cut = tmp_path / "rank0.json.gz"
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    strip = figures.step_strip({"cut": open_trace(cut), "whole": open_trace(h200 / "trace_none.json.gz")})
    assert "⚠ cut: " in strip.layout.title.text
    assert "⚠ whole" not in strip.layout.title.text
    assert "⚠ blocking: " in figures.waits([measured("blocking", traces=(cut,))]).layout.title.text
    lost = figures.step_strip({"huge": one_rank(open_trace(hostile / "hugedur"))}, step=6)
    assert any("⚠ 1 launch calls" in str(a.text) for a in lost.layout.annotations)


def test_cpu_trace_draws_phases_and_ops(tmp_path: Path) -> None:
    trace = open_trace(capture(tmp_path, gpu=False))
    figure = figures.timeline(trace)
    assert "no GPU: phases and ops by thread" in figure.layout.title.text
    assert {"compute", "draft", "verify"} <= {t.name for t in figure.data}
    assert "no GPU" in figures.step_strip({"none": trace}).layout.title.text


def test_strip_aligns_flags_and_measures(traces: dict[str, Any]) -> None:
    figure = figures.step_strip(traces, step=3)
    said = " ".join(a.text for a in figure.layout.annotations)
    assert "⚑ cudaStreamSynchronize" in said
    assert "launch lead +" in said
    assert "launch lead −" in said or "launch lead +0.01" in said
    first = [x for t in figure.data if t.name == "draft" for x in t.base if abs(x) < 1e-6]
    assert len(first) == 2  # both arms begin to draft at t = 0
    assert figure.layout.xaxis.range[0] < -0.5  # the host's part before it is in the picture


def test_strip_of_runs_and_what_is_missing(runs: list[Any]) -> None:
    figure = figures.step_strip([*runs, measured("pinned")])
    assert "no capture of: pinned" in figure.layout.title.text
    assert figures.step_strip([measured("pinned")]).layout.annotations[0].text
    assert figures.step_strip({}).layout.annotations[0].text
    assert "99" in figures.step_strip(runs, step=99).layout.annotations[0].text


def test_of_several_processes_one_capture_is_drawn(tmp_path: Path) -> None:
    one = capture(tmp_path)
    paths = [tmp_path / f"rank0_{pid}.{pid}.pt.trace.json" for pid in (11, 12)]
    for path in paths:
        path.write_bytes(one.read_bytes())
    figure = figures.step_strip([measured("none", traces=tuple(paths))])
    assert any(t.name == "draft" for t in figure.data)


@pytest.mark.parametrize(
    "make", [lambda: figures.latency([]), lambda: figures.acceptance([]), lambda: figures.comparison(pd.DataFrame())]
)
def test_nothing_is_a_message_not_an_error(make: Any) -> None:
    figure = make()
    assert isinstance(figure, go.Figure)
    assert figure.layout.annotations[0].text


def test_latency_carries_its_label_and_its_medians(runs: list[Any]) -> None:
    figure = figures.latency(runs)
    assert "on Test GPU, unprofiled" in figure.layout.title.text
    assert any("3.30" in a.text for a in figure.layout.annotations)
    quoted = measured("none", steps=measured("none").steps.iloc[:0], quoted={"step_ms_p50": 1.5})
    assert any("summary" in a.text for a in figures.latency(quoted).layout.annotations)


def test_comparison_states_verdicts_and_draws_recorded_outlined(runs: list[Any]) -> None:
    table = compare(runs)
    figure = figures.comparison(table)
    assert any("slower" in a.text and "▲" in a.text for a in figure.layout.annotations)
    solid = figure.data[0].marker.color
    outlined = figures.comparison(table.assign(source="recorded")).data[0].marker.color
    assert solid != outlined


def test_acceptance_states_the_identity() -> None:
    run = measured("none")
    figure = figures.acceptance(run)
    assert run.acceptance is not None
    assert list(figure.data[0].y) == pytest.approx(run.acceptance.by_position)
    assert f"{run.acceptance.accept_length:.2f}" in figure.data[0].name
    assert "1 + Σ" in figure.layout.title.text


def test_acceptance_of_nothing_drafted_says_so() -> None:
    plain = lab.load_run("small-speculation-ep1-bs1-plain-none")
    shown = figures.acceptance(plain)
    assert not shown.data
    assert "speculate=False" in shown.layout.annotations[0].text
    both = figures.acceptance([plain, lab.load_run("small-speculation-ep1-bs1-none")])
    assert [t.name for t in both.data] == ["small-speculation-ep1-bs1-none: 1 + 3.74 = 4.74 (simulated)"]
    assert "simulated" not in plain.label
    assert not compare([plain])["accept_simulated"][0]


def test_waits_leave_out_the_synchronise_that_ends_a_capture(tmp_path: Path) -> None:
    path = capture(tmp_path)
    trace = json.loads(path.read_text())
    end = {
        "ph": "X",
        "name": "cudaDeviceSynchronize",
        "cat": "cuda_runtime",
        "ts": 5700,
        "dur": 250,
        "pid": 1,
        "tid": 1,
        "args": {},
    }
    path.write_text(json.dumps({**trace, "traceEvents": [*trace["traceEvents"], end]}))
    none = measured("none", traces=(path,))
    assert len(open_trace(path).waits()) == 1
    assert not len(waits_table([none]))
    blocking = measured("blocking", traces=(capture(tmp_path, blocking=True),))
    assert list(waits_table([none, blocking])[["arm", "kind", "times_per_step", "us_per_step"]].iloc[0]) == [
        "blocking",
        "sync",
        1.0,
        330.0,
    ]
    figure = figures.waits([none, blocking])
    assert bars(figure, "synchronise").marker.pattern.fgcolor == COLOURS["wait"]
    assert [a.text for a in figure.layout.annotations] == ["0 µs", "330 µs"]


def test_wrong_arguments_say_what_to_pass(traces: dict[str, Any], runs: list[Run]) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: figures.timeline([]), "open_trace"),
        (lambda: figures.timeline(traces["none"], steps="1"), "slice"),  # pyright: ignore[reportArgumentType]
        (lambda: figures.comparison(runs), "compare"),  # pyright: ignore[reportArgumentType]
        (lambda: figures.step_strip([traces["none"]]), "by name"),
    ]
    for call, said in wrong:
        with pytest.raises(LabError, match=said):
            call()


def test_maps_of_too_many_runs_are_asked_for_by_fewer() -> None:
    said = lab.plot.expert_heatmap(lab.recorded_runs()).layout.annotations[0].text.replace("<br>", " ")
    assert "give at most 6" in said
    with pytest.raises(lab.LabError, match="who='nobody'"):
        lab.plot.expert_heatmap([], who="nobody")


@pytest.mark.parametrize("given", [None, 3, "x", [1], np.zeros(3), {"a": 3}, {"a": [1]}], ids=repr)
@pytest.mark.parametrize("name", ["break_even", "launch_lead", "step_costs", "training_curves", "verify_lengths"])
def test_what_no_figure_can_be_of_is_named(name: str, given: Any) -> None:
    with pytest.raises(LabError, match=r"; (give|lab\.|pass)"):
        getattr(lab.plot, name)(given)


def test_a_notebook_lists_figures_alone() -> None:
    assert dir(lab.plot) == sorted(lab.plot.__all__)
    assert "titled" not in dir(lab.plot)
