"""Figures of a diff, a what-if and the parts of steps: they say what the tables say, and mark what is withheld."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError
from dspark_lab.view.lanes import short


def test_the_waterfall_goes_from_before_to_after(h200: Path) -> None:
    found = lab.diff(h200 / "trace_none.json.gz", h200 / "trace_blocking.json.gz")
    figure = lab.plot.causes(found)
    ticks = figure.layout.yaxis.ticktext
    assert "cudaStreamSynchronize" in ticks[0]
    assert ticks[-1].endswith("smaller causes and the residual")
    delta = [
        float(a.text[3:-4].replace("−", "-")) for a in figure.layout.annotations if a.text.startswith(("<b>+", "<b>−"))
    ]
    assert sum(delta) == pytest.approx(found.delta_us, abs=0.05 * len(delta))
    first, last = figure.data[0], figure.data[-1]
    assert first.base[0] == pytest.approx(found.before_us)
    assert found.after_us == pytest.approx(last.base[0], abs=1.0)
    assert "slower: +255" in figure.layout.title.text
    assert "weak" in figure.layout.title.text


def test_withheld_causes_are_said_not_drawn(hostile: Path) -> None:
    found = lab.diff(hostile / "ok", hostile / "hugedur")
    assert "nan" not in lab.plot.causes(found).layout.title.text  # too few steps for an interval
    found = replace(found, withheld="12 launch calls have no device event")
    figure = lab.plot.causes(found)
    assert not figure.data
    assert "withheld" in figure.layout.annotations[0].text


def test_edits_are_ranked_and_pale_where_not_resolved(h200: Path) -> None:
    predicted = lab.whatif(h200 / "trace_blocking.json.gz", num_edits=10)
    bars = lab.plot.edits(predicted).data[0]
    assert list(bars.x) == sorted(bars.x, reverse=True)
    assert len(bars.x) == len(predicted.edits)
    assert [o == 1.0 for o in bars.marker.opacity] == [abs(g) > predicted.measured_us / 200 for g in bars.x]
    assert min(bars.marker.opacity) < 1.0
    figure = lab.plot.edits(predicted)
    assert any("make non-blocking aten::to" in t for t in figure.layout.yaxis.ticktext)
    assert "the replay of the unedited trace is off by +0.0" in figure.layout.title.text
    assert lab.plot.edits(lab.whatif(h200 / "trace_blocking.json.gz", num_edits=0)).layout.annotations[0].text


def test_parts_stack_to_the_period(h200: Path) -> None:
    figure = lab.plot.step_parts(h200 / "trace_blocking.json.gz")
    table = lab.step_parts(h200 / "trace_blocking.json.gz")
    total = np.sum([np.asarray(t.y, dtype=float) for t in figure.data], axis=0)
    assert total == pytest.approx(table["period_us"].to_numpy())
    assert figure.layout.barmode == "stack"


def test_a_step_whose_parts_are_withheld_is_an_outline(hostile: Path) -> None:
    figure = lab.plot.step_parts(hostile / "hugedur")
    lost = next(t for t in figure.data if t.name == "⚠ withheld")
    assert list(lost.x) == ["6"]
    assert list(lost.text) == ["⚠"]
    assert lost.marker.color == "white"
    assert "withheld" in figure.layout.title.text
    with pytest.raises(LabError, match="rank=7 is not in the trace; it has 0"):
        lab.plot.step_parts(hostile / "ok", rank=7)
    assert "No step" in lab.plot.step_parts(hostile / "metaonly").layout.annotations[0].text


def test_steps_beyond_the_cut_of_a_file_are_marked(tmp_path: Path) -> None:
    whole = lab.sample_traces()["sglang_after"].read_bytes()
    path = tmp_path / "cut.json.gz"
    path.write_bytes(whole[: len(whole) * 3 // 5])
    figure = lab.plot.step_parts(path)
    lost = next(t for t in figure.data if t.name == "⚠ withheld")
    assert list(lost.x) == ["4", "5", "6", "7"]
    assert "⚠ steps 4, 5, 6, 7 withheld" in figure.layout.title.text
    bands = lab.browse(path).scene.groups[0].bands
    assert [why[:6] for _, _, why in bands] == ["step 4", "step 5", "step 6", "step 7"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("_ZN7cutlass13device_kernelIN2at4cuda6detailE", "cutlass::device_kernel"),
        ("void at::native::elementwise_kernel<4>(int)", "elementwise_kernel"),
        ("_ZNxyz", "_ZNxyz"),
        ("nvjet_sm90", "nvjet_sm90"),
    ],
)
def test_short_names(name: str, said: str) -> None:
    assert short(name) == said
