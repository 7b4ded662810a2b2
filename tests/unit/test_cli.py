"""The command line: shapes of its JSON, and bad input as one line with exit code 2."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from dspark_lab.cli import main
from dspark_lab.cli.printing import show

PARITY = Path(__file__).parents[1] / "data" / "parity" / "qwen3_vanilla_b5"
H200 = Path(__file__).parents[1] / "data" / "traces" / "h200"


def lab_process(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a person starts it."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "400"}
    command = [sys.executable, "-m", "dspark_lab", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240)


def lab(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported everything: what it printed and would exit with."""
    out, err, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    argv = ["dspark-lab", *map(str, args)]
    try:
        with (
            patch.object(sys, "argv", argv), patch.dict(os.environ, {"COLUMNS": "400"}),
            redirect_stdout(out), redirect_stderr(err), chdir(cwd or Path.cwd()),
        ):  # fmt: skip
            main()
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def test_compare_prints_its_shape(tmp_path) -> None:
    out = lab_process(
        "compare",
        "--alloc",
        "none,blocking,on_demand",
        "--num-steps",
        6,
        "--repeats",
        2,
        "--device",
        "cpu",
        "--json",
        cwd=tmp_path,
    )
    assert out.returncode == 0, out.stderr
    rows = json.loads(out.stdout)
    assert [r["alloc"] for r in rows] == ["none", "blocking", "on_demand"]
    assert {"same_path_as", "ep_size", "source", "device", "profiled", "step_ms_p50", "step_ms_ci95", "delta_pct", "delta_pct_ci95",
            "verdict", "reason", "accept_length", "tokens_per_s"} <= set(rows[0])  # fmt: skip
    assert [r["verdict"] for r in rows] == ["baseline", "tie", "tie"]
    assert rows[2]["same_path_as"] == "none"
    assert rows[0]["same_path_as"] is None
    (folder,) = (tmp_path / "runs").iterdir()
    again = lab("export", "tensorboard", folder, "--logdir", tmp_path / "tb", "--json")
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["runs"]) >= 3


def test_run_prints_its_shape(tmp_path) -> None:
    out = lab(
        "run",
        "--num-steps",
        4,
        "--profile-steps",
        2,
        "--device",
        "cpu",
        "--set",
        "batch_size=2",
        "--json",
        cwd=tmp_path,
    )
    assert out.returncode == 0, out.stderr
    row = json.loads(out.stdout)
    assert row["name"].startswith("shipped-")  # what a person meets is trained
    assert row["accept_length"] == pytest.approx(1 + sum(row["accept_by_position"]))
    summary = lab("trace", "summary", row["path"], "--json", cwd=tmp_path)
    assert json.loads(summary.stdout)["num_steps"] == 2


def test_lists_stand_on_one_line(capsys) -> None:
    show({"tokens": list(range(99)), "nested": [[1, 2], [3]], "none": float("nan")}, as_json=False)
    out = capsys.readouterr().out
    assert json.loads(out) == {"tokens": list(range(99)), "nested": [[1, 2], [3]], "none": None}
    assert len(out.splitlines()) == 8


def test_generate_prints_its_shape() -> None:
    case = json.loads((PARITY / "cases.json").read_text())["cases"][0]
    ids = ",".join(map(str, case["prompt"]))
    out = lab("generate", "--target", PARITY / "target", "--drafter", PARITY / "drafter", "--prompt-ids", ids, "--json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == {
        "tokens": case["output"],
        "acceptance_lengths": case["acceptance_lengths"],
        "proposal_lengths": case["proposal_lengths"],
    }


def test_generate_continues_text_with_the_models_that_ship() -> None:
    out = lab("generate", "--prompt", "And God said, ", "--max-new-tokens", 12, "--json")
    assert out.returncode == 0, out.stderr
    row = json.loads(out.stdout)
    assert row["text"].startswith("And God said, ")
    assert len(row["tokens"]) == len("And God said, ") + 12
    assert set(row["proposal_lengths"]) == {7}


def test_trace_summary_prints_its_shape() -> None:
    out = lab("trace", "summary", H200 / "trace_blocking.json.gz", "--json")
    d = json.loads(out.stdout)
    assert d["num_steps"] == 8
    assert set(d["host_wait_us_per_step"]) == {"sync", "event_wait", "blocking_copy"}
    folder = lab("trace", "summary", H200.parent / "hostile" / "two", "--json")
    assert len(json.loads(folder.stdout)["ranks"]) == 2


def test_a_process_of_its_own_exits_with_2(tmp_path) -> None:
    out = lab_process("run", "--set", "batchsize=2", cwd=tmp_path)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr.startswith("dspark-lab: ")
    assert len(out.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["recorded"], ["doctor"]])
def test_tables_as_text_and_json(command: list[str]) -> None:
    assert lab(*command).returncode == 0
    assert isinstance(json.loads(lab(*command, "--json").stdout), list)


def generate_with(ids: str = "1,2", target: str = "target", *more: object) -> list[object]:
    return [
        "generate",
        "--target",
        PARITY / target,
        "--drafter",
        PARITY / "drafter",
        "--prompt-ids",
        ids,
        "--max-new-tokens",
        4,
        *more,
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["trace", "summary", "/nonexistent.json"], "/nonexistent.json"),
        (["trace", "summary", Path(__file__)], "test_cli.py"),
        (["compare", "--ep-size", "3", "--alloc", "blocking"], "ep_size=3"),
        (["compare", "--ep-size", "x"], "'x'"),
        (["compare", "--ep-size", "2", "--alloc", "none"], "alloc='none'"),
        (["compare", "--alloc", "blokking"], "blokking"),
        (["compare", "--preset", "tinny"], "tinny"),
        (["compare", "--device", "cuda", "--alloc", "none"], "cuda"),
        (["compare", "--alloc", "none", "--baseline", "pinned", "--num-steps", "2", "--repeats", "1", "--device", "cpu"], "pinned"),
        (["compare", "--num-steps", "0"], "num_steps=0"),
        (["run", "--out", "/proc/nothing"], "/proc/nothing"),
        (["run", "--set", "batchsize=2"], "Did you mean 'batch_size'?"),
        (["run", "--set", "batch_size"], "name=value"),
        (["run", "--set", "use_graph=true"], "use_graph=True"),
        (["generate"], "--prompt TEXT"),
        (generate_with("1,2", "target", "--prompt", "x"), "--prompt-ids 1,2,3 or"),
        (generate_with("1,2,999999"), "999999"),
        (generate_with(""), "empty prompt"),
        (generate_with("1,2", "nowhere"), "nowhere"),
        (generate_with("1,2", "target", "--block-size", 7), "7"),
        (generate_with("1,2", "target", "--device", "cuda"), "cuda"),
        (["export", "tensorboard", "no-such-run"], "no-such-run"),
        (["export", "tensorboard", "h200-moe-none", "--logdir", "/proc/tb"], "/proc/tb"),
        (["compare", "--no-such-option"], "--no-such-option"),
        (["run", "--attn-dp", "3"], "choose attn_dp and ep_size alike, of 1, 2, 4, 8"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exits_with_2(args: list[object], said: str, tmp_path) -> None:
    without_gpu = said in ("cuda", "use_graph=True")  # legal where there is one
    out = (lab_process if without_gpu else lab)(*args, cwd=tmp_path)
    assert out.returncode == 2, (out.returncode, out.stderr)
    assert said in out.stderr
    assert "Traceback" not in out.stderr
    if "dspark-lab:" in out.stderr:
        assert len(out.stderr.strip().splitlines()) == 1
    left = [p for p in tmp_path.rglob("*") if p.name not in ("runs",)]
    assert not left or "--baseline" in args, (
        left
    )  # nothing half-written (a wrong baseline is seen after the runs, which are kept)
