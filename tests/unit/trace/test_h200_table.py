"""The figures of the recorded H200 captures, as they were worked out when the captures were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_lab.trace import Trace, open_trace, summarize

#: file, kernels a step, stream syncs, period p50 µs, launch lead p50 µs, sync p50 µs, event wait p50 µs
TABLE = [
    ("trace_none", 588, 0, 3459, 2827, 0, 1150),
    ("trace_blocking", 588, 8, 3714, -221, 1438, 9),
    ("trace_non_blocking", 588, 0, 3442, 2784, 0, 1174),
    ("one_bs4_hw0_none_rank0", 547, 0, 4789, 3610, 0, 591),
    ("one_bs4_hw0_blocking_rank0", 547, 8, 5111, -175, 3386, 7),
    ("one_bs4_hw0_persistent_fill_rank0", 548, 0, 4775, 4158, 0, 2539),
    ("one_bs1_hw0_blocking_stack_rank0", 543, 8, 3749, -225, 1474, 9),
    ("one_bs1_hw150_two_blocking_rank0", 543, 16, 3970, -218, 1762, 7),
    ("tp2_bs1_hw0_none_rank0", 213, 0, 1529, 1124, 0, 283),
    ("tp2_bs1_hw0_none_rank1", 213, 0, 1529, 922, 0, 10),
    ("tp2_bs1_hw0_blocking_rank0", 213, 8, 1644, -64, 724, 6),
    ("tp2_bs1_hw0_blocking_rank1", 213, 8, 1641, -79, 514, 6),
]


def h200(traces: Path, name: str) -> Trace:
    trace = open_trace(traces / "h200" / f"{name}.json.gz")
    assert isinstance(trace, Trace)
    return trace


@pytest.mark.parametrize(
    ("name", "kernels", "syncs", "period", "lead", "sync", "event_wait"), TABLE, ids=[r[0] for r in TABLE]
)
def test_figures(traces, name, kernels, syncs, period, lead, sync, event_wait):
    trace = h200(traces, name)
    found = summarize(trace)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["num_steps"], found["profiled"]) == (8, True)
    assert found["kernels_per_step"] == kernels
    assert found["step_us_p50"] == pytest.approx(period, rel=0.001)
    assert found["launch_lead_us_p50"] == pytest.approx(lead, abs=1)
    waits = found["host_wait_us_p50"]
    assert waits["sync"] == pytest.approx(sync, abs=3, rel=0.02)
    assert waits["event_wait"] == pytest.approx(event_wait, abs=3, rel=0.02)
    assert waits["blocking_copy"] == 0
    counts = {
        w: sum(r["count"] for r in found["waits"] if w in r["name"]) for w in ("StreamSynchronize", "DeviceSynchronize")
    }
    assert counts == {"StreamSynchronize": syncs, "DeviceSynchronize": 2}
    launches = trace.launches()
    assert int(launches["is_graph"].sum()) == 16
    assert found["integrity"]["withheld"] == {}
    assert (trace.vendor, trace.is_cpu_only) == ("cuda", False)
    assert trace.steps()["step"].tolist() == list(range(8))


def test_span_per_step_is_no_step_time(traces):
    spans = [
        summarize(h200(traces, n))["gpu_span_us_per_step"]
        for n in ("trace_none", "trace_blocking", "trace_non_blocking")
    ]
    assert spans == pytest.approx([3554, 3806, 3566], abs=1)


def test_cold_first_step(traces):
    steps = h200(traces, "trace_blocking").steps()
    assert 4300 < steps["period_us"][0] < 4500
    assert steps["sync_us"][0] == pytest.approx(19, abs=1)


def test_last_device_synchronise_belongs_to_no_step(traces):
    waits = h200(traces, "trace_blocking").waits()
    last = waits[waits["name"] == "cudaDeviceSynchronize"]
    assert last["step"].tolist() == [-1, -1]
    assert last["site"].str.contains("outside the steps").all()


def test_one_pageable_copy_of_4_bytes_more_a_step(traces):
    def copies(name):
        return {(r["kind"], r["bytes"]): r["count"] for r in summarize(h200(traces, name))["memcpy"]}

    none = copies("trace_none")
    for arm in ("trace_blocking", "trace_non_blocking"):
        extra = {k: n - none.get(k, 0) for k, n in copies(arm).items() if n != none.get(k, 0)}
        assert extra == {("HtoD (Pageable -> Device)", 4): 8}


def test_stack_names_the_line_that_synchronises(traces):
    trace = h200(traces, "one_bs1_hw0_blocking_stack_rank0")
    waits = trace.waits()
    syncs = waits[waits["name"] == "cudaStreamSynchronize"]
    assert trace.has_stacks
    assert set(syncs["site"]) == {"<string>:64 alloc"}
    assert syncs["step"].tolist() == list(range(8))


def test_two_waits_of_one_chain_keep_apart(traces):
    rows = [
        r for r in summarize(h200(traces, "one_bs1_hw150_two_blocking_rank0"))["waits"] if "StreamSync" in r["name"]
    ]
    assert [r["count"] for r in rows] == [8, 8]
    assert rows[0]["total_us"] > 100 * rows[1]["total_us"]
    assert rows[1]["site"] == rows[0]["site"] + " #2"


def test_graph_kernels_know_their_launch(traces):
    kernels = h200(traces, "trace_none").kernels()
    assert kernels["in_graph"].mean() > 0.9
    assert set(kernels[kernels["in_graph"]]["call"]) == {"cudaGraphLaunch"}
    assert (kernels["call_ts_ns"] <= kernels["ts_ns"]).all()


def test_two_ranks_of_a_folder(traces, tmp_path):
    for rank in (0, 1):
        name = f"tp2_bs1_hw0_none_rank{rank}.json.gz"
        (tmp_path / name).write_bytes((traces / "h200" / name).read_bytes())
    ranks = open_trace(tmp_path)
    assert list(ranks) == [0, 1]
    assert list(summarize(ranks)["ranks"]) == ["0", "1"]
    across = ranks.across()
    assert across["step"].tolist() == list(range(8))
    assert across["period_us"][2:].median() == pytest.approx(1529, rel=0.01)
    assert across["skew_us"][0] > 100_000  # rank 0 began its capture about 0.2 s before rank 1
    assert set(ranks.steps()["rank"]) == {0, 1}


def test_folder_of_many_jobs_is_refused(traces):
    with pytest.raises(ValueError, match=r"two files are rank 0: .*blocking_stack_rank0.*two_blocking_rank0"):
        open_trace(traces / "h200")
