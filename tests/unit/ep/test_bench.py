"""The benches of exchanges run on a CPU, over gloo, with two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("module", "options", "ways"),
    [
        ("bench", ["--batch-sizes", "2"], {"all_reduce", "all_gather, rows apart", "all_to_all, rows apart"}),
        ("collectives", ["--sizes", "4096"], {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}),
    ],
)
def test_two_ranks(module: str, options: list[str], ways: set[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        f"dspark_lab.ep.{module}",
        "--device",
        "cpu",
        *options,
        "--json",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(out.read_text())
    assert told["ranks"] == 2
    assert ways <= {r["way"] for r in told["rows"]}
    assert all(r["p20_us"] <= r["p50_us"] <= r["p80_us"] for r in told["rows"])
