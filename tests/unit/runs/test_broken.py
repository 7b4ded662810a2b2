"""What users do to jobs and folders: interrupts, terminated ranks, files in the way; nothing is lost, nothing is overwritten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError
from dspark_lab.runs.record import read_run

LONG = {"num_steps": 100_000, "profile_steps": 0}


def cli(*args: object) -> subprocess.Popen[str]:
    """With Ctrl-C as a terminal gives it: what a shell starts in the background ignores it, and so would this."""
    command = [sys.executable, "-m", "dspark_lab", *map(str, args)]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_keeps_what_was_measured(sig: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    p = cli("run", "--preset", "tiny", "--ep-size", 2, "--num-steps", 100_000, "--device", "cpu", "--out", out)
    progress = out / ".jobs" / "000" / "progress.jsonl"
    end = time.monotonic() + 60
    while not (progress.exists() and '"step": ' in progress.read_text()):
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.5)
    p.send_signal(sig)
    _, err = p.communicate(timeout=30)
    assert p.returncode == 130
    assert "kept as runs marked stopped" in err
    assert "Traceback" not in err
    run = read_run(out / "tiny-ep2-bs4-on_demand")
    assert run.status == "stopped"
    assert len(run.steps) > 0
    assert not (out / ".jobs").exists()


def test_a_terminated_rank_marks_the_run_stopped(tmp_path: Path) -> None:
    job = lab.start([lab.preset("tiny", device="cpu", ep_size=2)], out=tmp_path / "out", **LONG)
    end = time.monotonic() + 60
    while job.poll().step < 8:
        assert time.monotonic() < end
        time.sleep(0.05)
    pid = json.loads((tmp_path / "out" / ".jobs" / "000" / "pid.rank1.json").read_text())["pid"]
    os.kill(pid, signal.SIGTERM)
    (run,) = job.wait(20)
    assert (run.status, job.poll().state) == ("stopped", "stopped")


def test_a_folder_with_other_things_is_never_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "out" / "tiny-ep1-bs4-on_demand" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(LabError, match="holds other things"):
        lab.run(lab.preset("tiny", device="cpu"), num_steps=2, out=tmp_path / "out")
    assert mine.read_text() == "mine"


def test_saving_over_what_is_no_run_is_refused(make_run, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("mine")
    with pytest.raises(LabError, match="is no run"):
        make_run().save(tmp_path / "a")
    assert (tmp_path / "a" / "thesis.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_job_that_cannot_save_ends_with_the_reason(tmp_path: Path) -> None:
    job = lab.start([lab.preset("tiny", device="cpu")], num_steps=60, profile_steps=0, out=tmp_path / "out")
    (tmp_path / "out" / "tiny-ep1-bs4-on_demand").write_text("in the way")
    with pytest.raises(LabError):
        job.wait(60)
    assert job.poll().state == "failed"


def test_a_callback_that_breaks_stops_the_job(tmp_path: Path) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("my progress bar")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="my progress bar"):
        lab.run(lab.preset("tiny", device="cpu"), num_steps=100_000, out=tmp_path / "out", on_progress=broken)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"schema": 1}', '{"schema": 1, "config": "x"}'])
def test_an_edited_run_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(LabError) as e:
        read_run(tmp_path)
    assert "\n" not in str(e.value)


def test_odd_arguments_are_named() -> None:
    for call in (
        lambda: lab.start([]),
        lambda: lab.start(["tiny"]),
        lambda: lab.compare(None),
        lambda: lab.load_run("x" * 5000),
    ):
        with pytest.raises(LabError):
            call()
    with pytest.raises(LabError, match="is no folder"):
        lab.load_runs("/nope")


def test_the_same_work_in_groups_of_its_own_is_a_tie_without_a_floor(tmp_path: Path, forked_ranks) -> None:
    with forked_ranks():
        runs = lab.sweep(
            lab.preset("tiny", device="cpu"),
            placement=["contiguous", "round_robin"],
            num_steps=4,
            repeats=2,
            profile_steps=0,
            out=tmp_path / "o",
        )
    row = lab.compare(runs, by="placement").set_index("placement").loc["round_robin"]
    assert row["verdict"] == "tie"
    assert "processes=3" in row["reason"]


def test_simulated_acceptance_is_said(tmp_path: Path) -> None:
    table = lab.compare(lab.recorded_runs(preset="seed"))
    assert table["accept_simulated"].all()
    assert all("simulated acceptance" in label for label in table["label"])
