"""Run folders: whole or not at all, and the same when read back."""

from __future__ import annotations

import json
import os

import pandas as pd
import pytest

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Acceptance, read_run
from dspark_lab.runs.store import load_run, load_runs, recorded


def test_a_run_survives_its_folder(make_run, tmp_path) -> None:
    run = make_run(name="a", num_ranks=2, alloc="blocking")
    saved = run.save(tmp_path / "a")
    again = read_run(tmp_path / "a")
    pd.testing.assert_frame_equal(again.steps, run.steps)
    assert again.config == run.config
    assert again.acceptance == run.acceptance
    assert (saved.shown_source, again.shown_source, again.source) == ("measured", "recorded", "measured")
    assert load_runs(tmp_path)[0].name == "a"


def test_steps_are_the_maximum_over_ranks_from_the_third_on(make_run) -> None:
    rows = make_run(num_ranks=3, num_steps=6, num_repeats=2).step_us()
    assert len(rows) == 2 * 4
    assert rows["step"].min() == 2
    assert rows.iloc[0]["step_us"] == 1000 + 20 + 2
    assert rows.iloc[0]["step_us_mean_ranks"] == 1000 + 20 + 1


def test_profiled_steps_never_count_as_unprofiled(make_run) -> None:
    run = make_run(profiled=True)
    assert len(run.step_us()) == 0
    assert run.step_ms_p50 != run.step_ms_p50  # NaN
    assert "profiled" in run.label
    assert "unprofiled" in make_run().label


def test_accept_length_is_one_plus_the_sum_over_positions() -> None:
    a = Acceptance(accepted=(2, 3, 0, 5), proposed=(0, 0, 0, 10))
    assert a.by_position == [0.8, 0.5, 0.5]
    mean = sum((k + 1) * n for k, n in enumerate(a.accepted)) / 10
    assert a.accept_length == pytest.approx(mean)


def test_nothing_half_written(make_run, tmp_path, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", broken)
    with pytest.raises(RuntimeError, match="disk full"):
        make_run().save(tmp_path / "x" / "a")
    assert os.listdir(tmp_path / "x") == []


def test_a_file_where_a_folder_should_be_is_named(make_run, tmp_path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(LabError, match="cannot write a run to"):
        make_run().save(tmp_path / "f" / "a")


def test_unreadable_runs_are_named(make_run, tmp_path) -> None:
    with pytest.raises(LabError, match="holds no run"):
        read_run(tmp_path)
    make_run().save(tmp_path / "a")
    d = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps(d | {"schema": 99}))
    with pytest.raises(LabError, match="schema 99"):
        read_run(tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text("{")
    with pytest.raises(LabError, match="cannot be read"):
        read_run(tmp_path / "a")
    with pytest.raises(LabError, match="no run 'nothing'"):
        load_run("nothing")


def test_recorded_has_its_columns() -> None:
    assert {"name", "alloc", "ep_size", "tp_size", "step_ms_p50", "device", "source"} <= set(recorded().columns)
