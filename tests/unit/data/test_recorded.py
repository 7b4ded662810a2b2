"""The runs that ship: complete, as measured, honest about their source, and small."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.runs.record import STEP_COLUMNS
from dspark_lab.runs.store import data_dir
from dspark_lab.trace import open_trace

STEP_MS = {
    "h200-moe-blocking": 3.357,
    "h200-moe-non_blocking": 3.263,
    "h200-moe-none": 3.285,
    "h200-tp2-blocking": 1.566,
    "h200-tp2-none": 1.477,
}
# the capture's own steps, profiled, µs, from the third step on
PERIOD_US = {
    "h200-moe-blocking": [3714],
    "h200-moe-non_blocking": [3442],
    "h200-moe-none": [3459],
    "h200-tp2-blocking": [1644, 1641],
    "h200-tp2-none": [1529, 1529],
}


@pytest.fixture(scope="module")
def importer() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(data_dir() / "recorded" / "import_captures.py"), run_name="importer"))


def test_the_imported_captures_ship():
    table = lab.recorded()
    imported = table[table["name"].isin(STEP_MS)]
    assert dict(zip(imported["name"], imported["step_ms_p50"], strict=True)) == STEP_MS
    assert set(table["source"]) == {"recorded"}
    assert set(table["device"]) == {"NVIDIA H200"}
    assert all("unprofiled" in label and "2026-11-29" in label for label in imported["label"])


def test_recordings_of_this_engine_are_complete_and_agree():
    runs = [r for r in lab.recorded_runs() if r.name not in STEP_MS]
    assert len(runs) > 60
    assert {r.status for r in runs} == {"complete"}
    outputs: dict[tuple, set[str]] = {}
    for run in runs:
        e, p = run.config.engine, run.config.parallel
        assert len(run.step_us()) > 0
        assert not run.config.engine.mask_padding or run.acceptance is not None
        cell = (
            run.config.preset,
            p.ep_size,
            p.tp_size,
            p.attn_dp,  # rows apart: forwards of other shapes, rounded otherwise
            e.batch_size,
            e.use_graph,
            e.speculate,
            run.steps["step"].max(),
        )
        outputs.setdefault(cell, set()).add(run.outputs["digest"])
    assert all(len(digests) == 1 for digests in outputs.values()), "strategies never change a token"
    assert sum(bool(r.trace_paths) for r in runs) <= 24


def test_recordings_can_be_asked_for_by_toggle():
    assert set(lab.recorded(tp_size=2)["tp_size"]) == {2}
    assert set(lab.recorded(preset="seed", alloc="blocking")["name"]) == {"seed-ep1-tp2-bs1-blocking"}
    with pytest.raises(lab.LabError, match="Did you mean 'tp_size'"):
        lab.recorded(tp_sise=2)
    with pytest.raises(lab.LabError, match=r"sheet='smal'.*Did you mean 'small'"):
        lab.recorded(sheet="smal")
    assert list(lab.recorded(tp_size=64).columns) == list(lab.recorded().columns)


def test_the_seeds_story_is_in_the_recordings():
    table = lab.compare(lab.recorded_runs(preset="seed")).set_index("alloc")
    assert table["verdict"].to_dict() == {
        "none": "baseline",
        "blocking": "slower",
        "non_blocking": "tie",
        "on_demand": "tie",
    }
    low, high = table.loc["blocking", "delta_pct_ci95"]
    assert 1.0 < low < table.loc["blocking", "delta_pct"] < high < 6.0


@pytest.mark.parametrize("name", STEP_MS)
def test_a_run_says_where_its_figure_comes_from(name: str):
    run = lab.load_run(name)
    config = run.config
    assert config.engine.alloc == name.split("-", 2)[2]
    assert (config.parallel.ep_size, config.parallel.tp_size) == (1, 2 if "tp2" in name else 1)
    assert bool(config.model.target.num_experts) == ("moe" in name)
    assert config.engine.use_graph
    assert config.engine.simulated_accept_length is None
    assert run.acceptance is None
    assert run.step_ms_p50 == STEP_MS[name]
    assert run.quoted["floor_pct"] == 1.0
    assert "not this package's engine" in run.quoted["protocol"]
    assert "not established" in run.quoted["protocol"]
    assert run.environment["torch"] == "2.11.0+cu130"


@pytest.mark.parametrize("name", STEP_MS)
def test_its_steps_are_the_captures_own_and_profiled(name: str):
    run = lab.load_run(name)
    assert list(run.steps.columns) == list(STEP_COLUMNS)
    assert run.steps["profiled"].all()
    assert len(run.step_us()) == 0, "profiled steps never enter a comparison"
    late = run.steps[run.steps["step"] >= 2].groupby("rank")["step_us"].median()
    assert late.tolist() == pytest.approx(PERIOD_US[name], rel=0.01)


@pytest.mark.parametrize("name", STEP_MS)
def test_its_captures_open(name: str):
    run = lab.load_run(name)
    assert [re.sub(r"\d{19}", "NS", p.name) for p in run.trace_paths] == [
        f"rank{r}.NS.pt.trace.json.gz" for r in range(run.config.parallel.world_size)
    ]
    for path in run.trace_paths:
        assert len(open_trace(path).steps()) == 8


@pytest.mark.parametrize("name", ["h200-moe-blocking", "h200-tp2-none"])
def test_the_importer_makes_what_ships(name: str, importer: SimpleNamespace, h200: Path, tmp_path: Path):
    (what,) = (r for r in importer.RUNS if r.name == name)
    made, ships = importer.make(what, h200, tmp_path), lab.load_run(name)
    assert made.to_json() == ships.to_json()
    pd.testing.assert_frame_equal(made.steps, ships.steps)
    assert [p.read_bytes() for p in made.trace_paths] == [p.read_bytes() for p in ships.trace_paths]


def test_shipped_data_stays_small():
    files = [p for p in data_dir().rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= 50 * 2**20
