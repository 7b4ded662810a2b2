"""The notebooks: run from the first cell to the last by nbmake, in a copy; and what is committed of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
TESTED_WITH: dict[str, dict[str, Any]] = {
    "01_quickstart.ipynb": {"strict": True},
    "09_train_a_drafter.ipynb": {"num_steps": 24, "num_prompts": 1, "max_new_tokens": 24},
}
"""Parameters that differ in the test: the panel raises what else would be a red line; a shorter training is one too."""

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def test_they_are_there():
    assert [p.stem for p in NOTEBOOKS] == [
        "01_quickstart",
        "02_ep1_regression",
        "03_tensorboard",
        "04_cuda_graphs",
        "05_ep_sweep",
        "06_open_your_trace",
        "07_draft_and_accept",
        "08_confidence_and_schedule",
        "09_train_a_drafter",
    ]


@each
def test_committed_clean(path: Path):
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert not [c.id for c in code if c.outputs or c.execution_count is not None]
    assert "widgets" not in nb.metadata
    assert nb.metadata.kernelspec.name == "python3"
    assert len([c for c in code if "parameters" in c.metadata.get("tags", [])]) == 1
    assert code[-1].source.count("assert ") >= 4  # it ends with what must hold of its numbers


@pytest.mark.notebook
@pytest.mark.timeout(280)
@each
def test_runs(path: Path, tmp_path: Path):
    nb = nbformat.read(path, as_version=4)
    set_parameters(nb, TESTED_WITH.get(path.name, {}))
    nbformat.write(nb, tmp_path / path.name)
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-kernel=python3", "--nbmake-timeout=120",
               "-p", "no:cacheprovider", "-q", path.name]  # fmt: skip
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=270)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


def set_parameters(nb: Any, values: dict[str, Any]) -> None:
    """A cell after the one tagged ``parameters``, as papermill does it; the names must be there."""
    if not values:
        return
    at = next(i for i, c in enumerate(nb.cells) if "parameters" in c.metadata.get("tags", []))
    for name in values:
        assert f"\n{name} = " in f"\n{nb.cells[at].source}"
    cell = nbformat.v4.new_code_cell("\n".join(f"{name} = {value!r}" for name, value in values.items()))
    nb.cells.insert(at + 1, cell)
