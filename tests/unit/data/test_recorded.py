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


def test_five_runs_ship():
    table = lab.recorded()
    assert dict(zip(table["name"], table["step_ms_p50"], strict=True)) == STEP_MS
    assert set(table["source"]) == {"recorded"}
    assert set(table["device"]) == {"NVIDIA H200"}
    assert all("unprofiled" in label and "2026-11-29" in label for label in table["label"])


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
    assert sum(p.stat().st_size for p in files) <= 45 * 2**20
