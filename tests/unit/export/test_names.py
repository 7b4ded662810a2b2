"""The names under which captures and runs go to TensorBoard."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from dspark_lab.export.names import run_names, worker_files

# what the PyTorch profiler plugin accepts (its consts.py)
WORKER = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")
NODE_PROCESS = re.compile(r"^(.*)_(\d+)")


def test_a_run_is_named_by_its_config(make_run):
    runs = [make_run(ep_size=2, alloc="blocking"), make_run(alloc="pinned:always", tp_size=2, batch_size=1)]
    assert run_names(runs) == ["tiny-ep2-blocking-bs4", "tiny-ep1-tp2-pinned_always-bs1"]


def test_runs_that_would_share_a_name_say_what_differs(make_run):
    runs = [make_run(block_size=n) for n in (3, 5)]
    assert run_names(runs) == ["tiny-ep1-on_demand-bs4-block_size_3", "tiny-ep1-on_demand-bs4-block_size_5"]


def test_equal_configs_are_numbered_and_the_aa_pair_is_told_apart(make_run):
    runs = [make_run(alloc="none"), make_run(alloc="none"), make_run(alloc="none", role="aa")]
    assert run_names(runs) == ["tiny-ep1-none-bs4", "tiny-ep1-none-bs4-2", "tiny-ep1-none-bs4-aa"]


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("rank0_123.1700000000000000001.pt.trace.json", "rank0_123"),
        ("rank3.1700000000000000001.pt.trace.json", "rank3_42"),
        ("host_tp_rank3_9.1700000000000000001.pt.trace.json", "rank3_9"),
        ("1700000000-TP-0.trace.json", "rank7_42"),
        ("trace.json", "rank7_42"),
    ],
)
def test_rank_and_pid_come_from_the_name_else_from_the_capture(tmp_path: Path, name: str, worker: str):
    path = tmp_path / name
    path.write_text('{"distributedInfo": {"backend": "nccl", "rank": 7}, "traceEvents": [{"ph": "X", "pid": 42}]}')
    ((source, target),) = worker_files([path])
    found = WORKER.match(target)
    assert source == path
    assert found is not None
    assert found[1] == worker
    assert re.fullmatch(r"\.\d{13,}", found[2])
    assert NODE_PROCESS.match(found[1])


def test_the_suffix_goes_by_the_content(tmp_path: Path):
    plain, packed = tmp_path / "rank0.json.gz", tmp_path / "rank1.json"
    plain.write_text('{"traceEvents": []}')
    packed.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    names = dict(worker_files([plain, packed]))
    assert names[plain].startswith("rank0_0.")
    assert names[plain].endswith(".pt.trace.json")
    assert names[packed].startswith("rank1_1.")
    assert names[packed].endswith(".pt.trace.json.gz")


def test_two_captures_of_one_rank_are_two_spans(tmp_path: Path):
    paths = [tmp_path / d / "rank0.1700000000000000001.pt.trace.json" for d in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("{}")
    assert [name for _, name in worker_files(paths)] == [
        "rank0_0.1700000000000000001.pt.trace.json",
        "rank0_0.1700000000000000002.pt.trace.json",
    ]


def test_a_cut_off_gzip_is_still_named(tmp_path: Path):
    path = tmp_path / "rank2.json.gz"
    path.write_bytes(gzip.compress(b"x" * 10_000)[:20])
    ((_, name),) = worker_files([path])
    assert name.startswith("rank2_2.")
