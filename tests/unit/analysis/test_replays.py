"""Graph replays, aligned node by node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dspark_lab as lab
from dspark_lab.analysis import padding
from dspark_lab.analysis.replays import LAUNCH_COLUMNS, NODE_COLUMNS


def graphs(path: Path, replays: list[list[tuple[str, float]]], ids: bool = False) -> Path:
    events: list[dict[str, Any]] = []
    for n, nodes in enumerate(replays):
        at = 1000.0 * n
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 1, "tid": 1, "ts": at, "dur": 900}
        )
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaGraphLaunch",
                "pid": 1,
                "tid": 1,
                "ts": at + 1,
                "dur": 9,
                "args": {"correlation": n + 1},
            }
        )
        ts = at + 50
        for name, dur in nodes:
            args = {"stream": 7, "device": 0, "correlation": n + 1}
            if ids:
                args |= {"graph id": 5, "graph node id": "abcdef".index(name) + 100}
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}
            )
            ts += dur + 2
    path.write_text(json.dumps({"traceEvents": events}))
    return path


WHOLE = [("a", 10.0), ("b", 20.0), ("a", 30.0), ("c", 40.0)]


def test_nodes_are_aligned_by_order(tmp_path: Path) -> None:
    slower = [("a", 10.0), ("b", 26.0), ("a", 30.0), ("c", 40.0)]
    found = lab.replays(graphs(tmp_path / "w.1.pt.trace.json", [WHOLE, slower, WHOLE]))
    assert found.nodes["name"].tolist() == ["a", "b", "a", "c"]
    assert found.nodes["dur_us_p50"].tolist() == [10.0, 20.0, 30.0, 40.0]
    assert found.nodes["dur_us_max"].tolist() == [10.0, 26.0, 30.0, 40.0]
    assert found.nodes["gap_us_p50"].tolist() == [0.0, 2.0, 2.0, 2.0]
    assert found.launches["is_complete"].all()
    assert found.launches["gap_us"].tolist() == [6.0, 6.0, 6.0]
    assert found.launches["graph"].unique().tolist() == ["graph A"]
    assert "3 graph replays" in found._repr_html_()


@pytest.mark.parametrize("ids", [False, True])
def test_an_incomplete_replay_is_flagged_and_moves_no_node(tmp_path: Path, ids: bool) -> None:
    whole = [("a", 10.0), ("b", 20.0), ("d", 30.0), ("c", 40.0)]
    found = lab.replays(graphs(tmp_path / "w.1.pt.trace.json", [whole, [whole[0], whole[2], whole[3]], whole], ids))
    assert found.launches["is_complete"].tolist() == [True, False, True]
    assert found.nodes["num_replays"].tolist() == [3, 2, 3, 3]
    assert found.nodes["dur_us_p50"].tolist() == [10.0, 20.0, 30.0, 40.0]
    assert found.launches["graph"].nunique() == 1
    assert found.launches["graph"].iloc[0] == ("graph 5" if ids else "graph A")


def test_an_incomplete_replay_withholds_the_parts_of_its_step_alone(tmp_path: Path) -> None:
    table = lab.breakdown(graphs(tmp_path / "w.1.pt.trace.json", [WHOLE, WHOLE[:3], WHOLE, WHOLE]))
    assert (table["withheld"] != "").tolist() == [False, True, False, False]


def test_h200_draft_and_verify(h200: Path) -> None:
    found = lab.replays(h200 / "trace_blocking.json.gz")
    assert found.launches.groupby("graph")["num_nodes"].unique().map(list).to_dict() == {
        "graph A": [121],
        "graph B": [472],
    }
    assert found.launches.groupby("graph").size().to_dict() == {"graph A": 8, "graph B": 8}
    assert len(found.nodes) == 121 + 472
    assert (found.nodes["num_replays"] == 8).all()


def test_no_graphs_gives_empty_tables(hostile: Path) -> None:
    found = lab.replays(hostile / "ok")
    assert tuple(found.launches.columns) == LAUNCH_COLUMNS
    assert tuple(found.nodes.columns) == NODE_COLUMNS


def test_kernels_before_a_replay_are_its_own_row(made, write, h200):
    trace = made()
    for step in range(4):
        t = 1000.0 * step
        trace.mark(f"ProfilerStep#{step}", t, 900)
        for k in range(2):
            trace.device("fill", t + 30 + 10 * k, 4, trace.call("LaunchKernel", t + 5 + 8 * k, 5))
        launch = trace.call("GraphLaunch", t + 40, 100)
        trace.device("gemm", t + 200, 40, launch).device("gemm", t + 250, 40, launch)
        trace.device("sample", t + 300, 7, trace.call("LaunchKernel", t + 160, 5))
    rows = lab.replays(write(trace.content())).launches
    assert rows["num_pre_kernels"].tolist() == [2] * 4
    assert rows["pre_kernels_us"].tolist() == [8.0] * 4
    assert set(rows["pre_kernels"]) == {"2 × fill"}
    assert (rows["batch"].tolist(), set(rows["captured_source"])) == ([-1] * 4, {""})
    real = lab.replays(h200 / "trace_none.json.gz").launches
    assert real["num_pre_kernels"].gt(0).any()


def test_padding_from_annotations_and_from_the_largest_batch(made, write):
    def loop(around):
        trace = made()
        for step, batch in enumerate((5, 8, 3)):
            t = 1000.0 * step
            trace.mark(f"step[DECODE bs={batch}]", t, 900)
            if around:
                trace.mark(around, t + 30, 200)
            launch = trace.call("GraphLaunch", t + 40, 100)
            trace.device("gemm", t + 200, 40, launch).device("norm", t + 250, 40, launch)
        return lab.replays(write(trace.content())).launches

    told = loop("cuda_graph bs=16")
    assert told["batch"].tolist() == [5, 8, 3]
    assert (told["captured_batch"].tolist(), set(told["captured_source"])) == ([16, 16, 16], {"annotation"})
    guessed = loop(None)
    assert (guessed["captured_batch"].tolist(), set(guessed["captured_source"])) == ([8, 8, 8], {"at least"})


@pytest.mark.parametrize(
    ("name", "batch"),
    [("execute_context_0(0)_generation_5(5)", 5), ("step[TARGET_VERIFY bs=4]", 4), ("ProfilerStep#3", -1)],
)
def test_batch_of_a_label(name, batch):
    assert padding._number(padding._BATCH, name) == batch


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("padded batch_size: 8", 8),
        ("cudagraph(num_tokens=32)", 32),
        ("captured graph, size = 4", 4),
        ("graph_runner.py(3)", -1),
    ],
)
def test_captured_size_of_a_label(name, size):
    assert padding._number(padding._CAPTURED, name) == size
