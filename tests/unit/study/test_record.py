"""The recorder, on this machine's CPU with sheets of its own: runs, kept captures, one archive."""

from __future__ import annotations

import tarfile

import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError
from dspark_lab.runs.plan import group
from dspark_lab.runs.record import read_run
from dspark_lab.study import record as recording
from dspark_lab.study import sheets as recorder
from dspark_lab.study.record import record
from dspark_lab.study.sheets import Sheet, rehearsed, sheets


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


def test_what_was_complete_is_kept_where_a_recording_breaks(tmp_path, monkeypatch) -> None:
    tiny = preset("tiny", device="cpu", batch_size=1, alloc="on_demand")
    sheet = Sheet(configs=(tiny.replace(ep_size=2), tiny), num_steps=2, repeats=1, processes=1, profile_steps=0)
    monkeypatch.setitem(recorder.PARTS, "one", lambda: {"cpu": sheet})
    told = recording._measured

    def breaks(sheet, *rest):
        if sheet.configs[0].parallel.world_size > 1:
            raise LabError("rank 1 of 2 is gone")
        yield from told(sheet, *rest)

    monkeypatch.setattr(recording, "_measured", breaks)
    with pytest.raises(LabError, match="rank 1"):
        record("one", out=tmp_path)
    with tarfile.open(tmp_path / "recorded-one.tar") as tar:
        assert [n for n in tar.getnames() if n.endswith("run.json")] == ["recorded/cpu-ep1-bs1-on_demand/run.json"]


@pytest.mark.parametrize("ranks", [4, 8])
def test_sheets_of_several_ranks_have_every_cell(ranks: int) -> None:
    made = sheets(f"ep{ranks}")
    sizes = {n for n in (1, 2, 4, 8) if n <= ranks}
    for name in ("small", "qwen3-30b-a3b"):
        arms, apart = made[f"ep{ranks}-{name}"].configs, made[f"ep{ranks}-{name}-dispatch"].configs
        assert {(c.parallel.ep_size, c.engine.batch_size) for c in arms} == {(n, b) for n in sizes for b in (1, 8, 32)}
        at_most = [c for c in arms if c.parallel.ep_size == ranks and c.engine.batch_size == 8]
        assert [(c.engine.alloc, c.engine.mask_padding) for c in at_most] == [
            ("none", False), ("blocking", True), ("on_demand", True), ("graph_slot", True)
        ]  # fmt: skip
        ways = {
            (c.parallel.dispatcher, c.parallel.attn_dp, c.parallel.placement)
            for c in apart
            if c.parallel.ep_size == ranks
        }
        assert len(ways) == 9
        for sheet in (arms, apart):
            group(sheet)  # legal, and names are unique
    assert all(s.repeats == 3 and s.num_steps == 128 and s.profile_steps == 8 for s in made.values())


def test_a_rehearsal_runs_anywhere(tmp_path) -> None:
    sheet = rehearsed(sheets("ep4")["ep4-small"])
    assert {c.engine.device for c in sheet.configs} == {"cpu"}
    assert {c.parallel.ep_size for c in sheet.configs} == {1, 2, 4}
    assert len(sheet.configs) < len(sheets("ep4")["ep4-small"].configs)


def test_too_few_gpus_are_told_before_anything_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dspark_lab.device.num_gpus", lambda: 2)
    with pytest.raises(
        LabError, match=r"sheet 'ep8-small' wants 8 GPUs, one a rank, and there are 2; choose .*rehearse"
    ):
        record("ep8", out=tmp_path)
    assert not list(tmp_path.iterdir())
