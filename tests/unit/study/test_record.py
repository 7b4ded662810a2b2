"""The recorder, on this machine's CPU with sheets of its own: runs, kept captures, one archive."""

from __future__ import annotations

import tarfile

import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError
from dspark_lab.runs.plan import group
from dspark_lab.runs.record import read_run
from dspark_lab.study import record as recorder
from dspark_lab.study.record import Sheet, record, sheets


def test_sheets_are_legal_configs_and_stay_within_the_captures_that_ship() -> None:
    kept = 0
    for part in ("one", "two"):
        for sheet in sheets(part).values():
            for g in group(sheet.configs):
                for arm in g.arms:
                    flat = arm.config.to_dict()
                    at = all(flat[k] == v for k, v in sheet.traces_at.items())
                    kept += arm.role == "arm" and arm.config.engine.alloc in sheet.keep_traces and at
    assert 10 <= kept <= 24
    with pytest.raises(LabError, match="part='three'"):
        sheets("three")


def test_a_sheet_leaves_runs_captures_and_an_archive(tmp_path, monkeypatch) -> None:
    tiny = preset("tiny", device="cpu", batch_size=1)
    sheet = Sheet(
        configs=tuple(tiny.replace(alloc=a) for a in ("none", "blocking", "on_demand")),
        num_steps=4,
        repeats=1,
        processes=2,
        profile_steps=3,
        keep_traces=("none",),
    )
    monkeypatch.setitem(recorder.PARTS, "one", lambda: {"cpu": sheet})
    archive = record("one", out=tmp_path)
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    assert sum(n.endswith(".pt.trace.json.gz") for n in names) == 1
    runs = {p.name: read_run(p) for p in (tmp_path / "recorded").iterdir()}
    assert set(runs) == {
        "cpu-ep1-bs1-none",
        "cpu-ep1-bs1-none.aa",
        "cpu-ep1-bs1-blocking",
        "cpu-ep1-bs1-on_demand",
    }
    none = runs["cpu-ep1-bs1-none"]
    assert set(none.steps["process"]) == {0, 1}
    assert runs["cpu-ep1-bs1-on_demand"].same_path_as == "none"
    hit = none.ep[0]["target"]["experts_hit"]
    assert all(1 <= h <= 8 for h in hit)
    assert {p.name for p in tmp_path.iterdir()} == {"recorded", "recorded-one.tar"}
    with pytest.raises(LabError, match="sheet='nothing'"):
        record("one", out=tmp_path, only=["nothing"])
