"""The trace commands: shapes of their JSON, tables, what ``--strict`` does. In this process, for speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_lab.cli import app
from dspark_lab.trace.cache import Cache

DATA = Path(__file__).parents[1] / "data" / "traces"
H200, HOSTILE = DATA / "h200", DATA / "hostile"


def trace(*args: object) -> Any:
    return CliRunner().invoke(app, ["trace", *map(str, args)], env={"COLUMNS": "400"})


def test_trace_commands_print_their_shapes_and_tables() -> None:
    one, two = H200 / "trace_blocking.json.gz", HOSTILE / "two"
    steps = json.loads(trace("steps", one, "--json").stdout)
    assert len(steps) == 8
    parts = (
        "compute_us",
        "communication_us",
        "peer_wait_us",
        "copy_us",
        "idle_host_us",
        "idle_graph_us",
        "idle_other_us",
    )
    assert all(sum(r[p] for p in parts) == pytest.approx(r["period_us"]) and r["withheld"] == "" for r in steps)
    waits = json.loads(trace("waits", one, "--json").stdout)
    assert waits[0]["name"] == "cudaStreamSynchronize"
    assert waits[0]["lost_us_per_step"] > 200
    assert len(json.loads(trace("waits", one, "--each", "--json").stdout)) == 16
    report = json.loads(trace("integrity", two, "--json").stdout)
    assert list(report["ranks"]) == ["0", "1"]
    assert (report["problems"], report["missing_ranks"]) == ([], [])
    for command, said in (
        ("summary", "step p50"),
        ("steps", "idle: host"),
        ("waits", "aten::copy_"),
        ("integrity", "rank 0: sound"),
    ):
        out = trace(command, one)
        assert said in out.stdout, out.stderr


@pytest.mark.parametrize("command", ["summary", "steps", "waits", "integrity", "diff", "whatif"])
def test_strict_ends_with_1_where_the_trace_is_undermined(command: str) -> None:
    hostile = HOSTILE
    sound, mended = (
        hostile / "ok" / "w.1700000000000.pt.trace.json",
        hostile / "quote" / "w.1700000000000.pt.trace.json",
    )
    more = [sound] if command == "diff" else []
    out = trace(command, mended, *more, "--strict", "--json")
    assert (out.exit_code, json.loads(out.stdout) is not None) == (1, True), out.stderr
    assert "integrity: rank 0: 3 × unescaped quote" in out.stderr
    assert trace(command, mended, *more, "--json").exit_code == 0
    assert trace(command, sound, *more, "--strict").exit_code == 0


def test_export_writes_and_says_what(tmp_path: Path) -> None:
    out = trace("export", H200 / "trace_none.json.gz", "-o", tmp_path / "x.json", "--steps", "2:4", "--json")
    made = json.loads(out.stdout)
    assert (made["steps"], made["path"], made["num_flows"]) == ([2, 3], str(tmp_path / "x.json"), 34)
    assert (
        "steps 3 to 3; open it at ui.perfetto.dev"
        in trace("export", H200 / "trace_none.json.gz", "-o", tmp_path / "x.json", "--steps", "3").stdout
    )
    assert "steps='x'" in str(trace("export", H200 / "trace_none.json.gz", "--steps", "x").exception)


def test_report_writes_a_page(tmp_path: Path) -> None:
    out = trace(
        "report", H200 / "trace_none.json.gz", H200 / "trace_blocking.json.gz", "-o", tmp_path / "r.html", "--json"
    )
    assert json.loads(out.stdout)["path"] == str(tmp_path / "r.html")
    assert "cudaStreamSynchronize" in (tmp_path / "r.html").read_text()


def test_no_cache_leaves_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_LAB_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr(Cache.read, "__kwdefaults__", {"stacks": True, "least_bytes": 0})
    assert trace("summary", H200 / "trace_none.json.gz", "--no-cache").exit_code == 0
    assert not (tmp_path / "c").exists()
    assert trace("summary", H200 / "trace_none.json.gz").exit_code == 0
    assert len(list((tmp_path / "c").iterdir())) == 1
