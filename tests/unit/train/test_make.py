"""The script behind the shipped models: which drafters a sweep over depths trains, in which order, and what it leaves out."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.runs.store import data_dir


@pytest.fixture(scope="module")
def make() -> Any:
    spec = spec_from_file_location("make_models", data_dir() / "models" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def depth_jobs(make: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, list[str]]:
    """What ``make.py depth`` would have run."""
    taken: dict[str, list[str]] = {}
    monkeypatch.setattr(make, "run_jobs", lambda args, jobs, deadline: taken.update(jobs))
    monkeypatch.setattr(sys, "argv", ["make.py", "depth", "--out", str(out), *options])
    make.main()
    return taken


def test_depths_go_seed_by_seed_and_depth_by_depth(make, monkeypatch, tmp_path):
    options = ("--kinds", "eagle3", "dspark-rnn", "dflash", "--depths", "1", "3", "--seeds", "2", "--steps", "5")
    jobs = depth_jobs(make, monkeypatch, tmp_path, *options)
    first = ["eagle3@depth1@seed0", "dspark-rnn@depth1@seed0", "dflash@depth1@seed0"]
    deeper = ["dspark-rnn@depth3@seed0", "dflash@depth3@seed0"]  # eagle3 has one layer
    assert list(jobs) == [name for seed in "01" for name in (n[:-1] + seed for n in first + deeper)]
    command = jobs["dflash@depth3@seed1"]
    given = dict(pairwise(command))
    assert {name: given[f"--{name}"] for name in ("rate", "seed", "layers", "steps")} == {
        "rate": "0.004", "seed": "1", "layers": "3", "steps": "5",
    }  # fmt: skip
    assert Path(given["--source"]) == data_dir() / "models"
    assert "--drop" in command


def test_depths_that_were_measured_are_not_trained_again(make, monkeypatch, tmp_path):
    run = {"seconds": 1.0, "text": {"code": {"accept_length": 2.0}}}
    (tmp_path / "dflash@depth1@seed0.note.json").write_text(json.dumps(run))
    jobs = depth_jobs(make, monkeypatch, tmp_path, "--kinds", "dflash", "--depths", "1", "2")
    assert list(jobs) == ["dflash@depth2@seed0"]
    assert json.loads((tmp_path / "report.json").read_text()) == {"dflash@depth1@seed0": run}
