"""lab.doctor: every row says what to do, and no missing or broken package stops it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import dspark_lab as lab
from dspark_lab import health

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, health.Row]:
    return {r.name: r for r in lab.doctor().itertuples(index=False, name="Row")}


def test_all_is_well_in_the_development_install():
    found = rows()
    assert list(lab.doctor().columns) == ["name", "status", "detail", "what_to_do"]
    assert {found[n].status for n in ("python", "torch", "plotly", "anywidget", "tensorboard", "device cpu")} == {"ok"}
    assert found["TensorBoard profiler tab"].status == "ok"
    assert found["work folder"].status == "ok"
    assert "h200-moe-blocking" in found["recorded runs"].detail
    assert found["torch"].detail == metadata.version("torch")


def test_whatever_is_not_ok_says_what_to_do():
    assert all(r.what_to_do for r in rows().values() if r.status != "ok")


def test_the_packages_are_those_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, names in health.PACKAGES.items():
        assert {re.split(r"[<>=;\[ ]", r)[0] for r in extras[extra]} == set(names), extra or "base"


def test_no_package_at_all(monkeypatch):
    def none(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(health.metadata, "version", none)
    monkeypatch.setattr(health.metadata, "entry_points", lambda **_: [])
    found = rows()
    for name in ("torch", "plotly", "tensorboard", "device", "plotly renderer", "TensorBoard profiler tab"):
        assert found[name].status == "missing", name
        assert "pip install" in found[name].what_to_do
    assert "dspark-lab[triton]" in found["triton"].what_to_do
    assert found["dspark-lab"].detail == "source tree, not installed"


def test_packages_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    found = rows()
    assert found["device"].status == "problem"
    assert found["plotly renderer"].status == "problem"


def test_a_renderer_that_needs_the_internet(monkeypatch):
    pio = pytest.importorskip("plotly.io")
    monkeypatch.setattr(pio.renderers, "default", "notebook_connected")
    assert rows()["plotly renderer"].status == "problem"


def test_a_folder_that_cannot_be_written(monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(health.tempfile, "TemporaryFile", refuse)
    assert rows()["work folder"].status == "problem"


def test_no_recorded_runs(monkeypatch):
    monkeypatch.setattr(health, "recorded_names", list)
    assert rows()["recorded runs"].status == "problem"


def test_the_module_loads_without_torch_and_plotly():
    code = "import sys, dspark_lab.health; print([m for m in ('torch', 'plotly', 'tensorboard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
