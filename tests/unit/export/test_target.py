"""An export never writes over what it was made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dspark_lab as lab


@pytest.fixture
def trace(h200: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(h200 / "trace_blocking.json.gz", tmp_path / "mine.json.gz"))


def test_a_trace_is_not_written_over(trace: Path) -> None:
    before = trace.read_bytes()
    with pytest.raises(lab.LabError, match="is the trace that was read and would be lost"):
        lab.to_perfetto(lab.open_trace(trace), trace)
    with pytest.raises(lab.LabError, match="would be lost"):
        lab.to_report(trace, trace, trace)
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    ("path", "says"), [("", "is no file name"), (3, "path=3 is no file name"), (".", "is a folder")]
)
def test_bad_targets_are_named(trace: Path, path, says: str) -> None:
    for write in (lambda: lab.to_perfetto(trace, path), lambda: lab.to_report(trace, trace, path)):
        with pytest.raises(lab.LabError, match=says):
            write()


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_no_size(trace: Path, tmp_path: Path, size: float) -> None:
    with pytest.raises(lab.LabError, match="max_mb="):
        lab.to_perfetto(trace, tmp_path / "out.json", max_mb=size)
    assert not (tmp_path / "out.json").exists()
