"""Jobs of real ranks: figures, EP sizes, Stop, a killed rank, errors; nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError, RunFailed
from dspark_lab.runs.job import Job
from dspark_lab.trace import open_trace
from tests.unit.runs import alive

ARMS = ["none", "blocking", "non_blocking", "on_demand"]


def wait_for_step(job: Job, step: int = 8) -> None:
    end = time.monotonic() + 60
    while job.poll().step < step:
        assert time.monotonic() < end, job.poll()
        assert not job.poll().done, job.poll()
        time.sleep(0.05)


def test_a_sweep_of_the_seeds_arms(tmp_path) -> None:
    seen = []
    runs = lab.sweep(
        lab.preset("tiny", device="cpu"), alloc=ARMS, num_steps=6, repeats=2, processes=2, profile_steps=3,
        out=tmp_path / "out", on_progress=lambda p: seen.append(p.fraction),
    )  # fmt: skip
    by_name = {r.name: r for r in runs}
    assert [r.role for r in runs].count("aa") == 1
    arms = {r.config.engine.alloc: r for r in runs if r.role == "arm"}
    assert set(arms) == set(ARMS)
    assert arms["on_demand"].same_path_as == "none"
    assert len({r.outputs["digest"] for r in runs}) == 1
    assert len({r.acceptance.accept_length for r in runs if r.acceptance}) == 1
    none = arms["none"]
    measured = none.steps[~none.steps["profiled"]]
    assert len(measured) == 6 * 2 * 2
    assert set(measured["process"]) == {0, 1}
    assert (measured["step_us"] > 0).all()
    assert len(none.trace_paths) == 1  # one an arm, from the first process
    trace = open_trace(none.trace_paths[0])
    assert len(trace.steps()) == 3
    assert {"dspark::draft", "dspark::verify", "dspark::accept"} <= set(trace.phases()["name"])
    assert (tmp_path / "out" / none.name / "run.json").exists()
    assert not (tmp_path / "out" / ".jobs").exists()
    assert seen[-1] == 1.0
    assert by_name.keys() == {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")}


@pytest.mark.parametrize("weights", ["bigram", "random"])
def test_ep_size_never_changes_a_token(weights: str, tmp_path, forked_ranks) -> None:
    cfg = lab.preset("tiny", device="cpu", weights=weights, batch_size=3)
    with forked_ranks():
        runs = lab.sweep(
            cfg, ep_size=[1, 2, 4], alloc=["on_demand"], num_steps=8, repeats=1,
            profile_steps=2 * (weights == "random"), out=tmp_path / "out",
        )  # fmt: skip
    assert [r.config.parallel.ep_size for r in runs] == [1, 2, 4]
    assert len({r.outputs["digest"] for r in runs}) == 1
    for run in runs:
        n = run.config.parallel.ep_size
        assert sorted(e["rank"] for e in run.ep) == list(range(n))
        # each rank holds only its experts' bytes, and sends what a ring all-reduce sends
        assert {e["expert_bytes"] for e in run.ep} == {runs[0].ep[0]["expert_bytes"] // n}
        assert all((e["bytes_sent"] == 0) == (n == 1) for e in run.ep)
        if n > 1 and weights == "random":
            assert len(run.trace_paths) == n
            names = set(open_trace(run.trace_paths[0]).phases()["name"])
            assert {"ep::dispatch", "ep::combine"} <= names
    rows = {r.config.parallel.ep_size: sum(e["rows_computed"] for e in r.ep) for r in runs}
    assert rows[2] == rows[4] < rows[1]  # at EP1 nothing masks the padded request's rows


def test_stop_keeps_what_was_measured(tmp_path) -> None:
    job = lab.start([lab.preset("tiny", device="cpu", ep_size=2)], num_steps=100_000, out=tmp_path / "out")
    wait_for_step(job)
    assert alive.alive(tmp_path)
    asked = time.monotonic()
    job.stop()
    (run,) = job.wait(20)
    assert time.monotonic() - asked < 10
    assert job.poll().state == "stopped"
    assert run.status == "stopped"
    assert len(run.steps) > 4
    assert alive.all_end(tmp_path)


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_killed_process_ends_the_job_with_its_name(victim: str, tmp_path) -> None:
    job = lab.start([lab.preset("tiny", device="cpu", ep_size=2)], num_steps=100_000, out=tmp_path / "out")
    wait_for_step(job)
    assert alive.alive(tmp_path)
    folder = tmp_path / "out" / ".jobs" / "000"
    pid = json.loads((folder / "pid.rank1.json").read_text())["pid"]
    if victim == "agent":
        pid = psutil.Process(pid).ppid()
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RunFailed) as e:
        job.wait(20)
    assert time.monotonic() - killed < 10
    assert "rank" in str(e.value)
    assert "killed" in str(e.value)
    assert job.poll().state == "failed"
    assert alive.all_end(tmp_path)


def test_what_a_rank_refuses_comes_back_as_one_line_and_leaves_nothing(tmp_path) -> None:
    cfg = lab.preset("tiny", device="cpu", context_len=2_000_000_000, max_new_tokens=16)
    with pytest.raises(LabError, match="GiB") as e:
        lab.run(cfg, num_steps=2, out=tmp_path / "out")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"repeats": True}, "repeats=True"),
        ({"profile_steps": -1}, "profile_steps=-1"),
    ],
)
def test_bad_numbers_are_refused_before_anything_runs(settings: dict, said: str, tmp_path) -> None:
    with pytest.raises(LabError, match=said):
        lab.start([lab.preset("tiny")], out=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(LabError, match="'num_step'"):
        lab.sweep(lab.preset("tiny"), alloc=["none"], num_step=3)  # type: ignore[arg-type]


def test_an_unwritable_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(LabError, match="cannot be written"):
        lab.run(lab.preset("tiny"), out=tmp_path / "f" / "out")
