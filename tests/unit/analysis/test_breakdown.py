"""Where the step goes: parts that sum to the nanosecond, and idle time told apart by what the device was idle for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dspark_lab as lab
from dspark_lab.analysis.breakdown import COLUMNS, PARTS
from dspark_lab.analysis.comm import clocks, comm_labels, match_collectives

NS = [f"{p}_ns" for p in PARTS]
NAMES = ("gemm", "ncclDevKernel_AllReduce", "Memcpy DtoD (Device -> Device)", "deep_ep::intranode::combine")


def write(path: Path, events: list[dict[str, Any]], rank: int = 0) -> Path:
    path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events}))
    return path


def host(name: str, ts: float, dur: float, correlation: int = -1, cat: str = "cuda_runtime") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": correlation},
    }


def device(name: str, ts: float, dur: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    args = {"stream": stream, "device": 0, "correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def brute(events: list[tuple[int, int, int]], begin: int, end: int) -> dict[str, int]:
    """Nanoseconds of [begin, end) by the highest class that is running: 0 compute, 1 communication, 2 copy."""
    best = np.full(end - begin, 3)
    for kind, start, dur in events:
        a, b = max(start, begin), min(start + dur, end)
        if b > a:
            best[a - begin : b - begin] = np.minimum(best[a - begin : b - begin], kind)
    return {
        "compute": int((best == 0).sum()),
        "communication": int((best == 1).sum()),
        "copy": int((best == 2).sum()),
        "idle": int((best == 3).sum()),
    }


steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(1, 300), st.sampled_from((7, 20))),
        min_size=1,
        max_size=8,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_parts_sum_to_the_period_and_equal_a_brute_force(tmp_path: Path, drawn: list) -> None:
    events, plain, correlation, firsts, lasts = [], [], 0, [], []
    for n, step in enumerate(drawn):
        at = 1000 * n
        events.append(host(f"ProfilerStep#{n}", at / 1000, 0.9, cat="user_annotation"))
        mine = []
        for kind, offset, dur, stream in step:
            correlation += 1
            start = 700 + at + offset
            events.append(host("cudaLaunchKernel", (at + correlation % 50) / 1000, 0.005, correlation))
            events.append(device(NAMES[kind], start / 1000, dur / 1000, correlation, stream))
            mine.append((kind if kind < 3 else 1, start, dur, stream))
        plain += mine
        firsts.append(min(s for _, s, _, _ in mine))
        lasts.append(mine)
    trace = lab.open_trace(write(tmp_path / "w.1.pt.trace.json", events))
    if (
        trace.integrity.num_overruns
    ):  # events that swallow the next of their stream are cut, which the brute force does not do
        return
    table = lab.breakdown(trace)
    assert (table[NS] >= 0).all().all()
    assert (table[NS].sum(axis=1) == table["period_ns"]).all()
    assert np.array_equal(table["period_ns"], (trace.steps()["period_us"] * 1000).round().astype(np.int64))
    ends = [*firsts[1:], max(s + d for _, s, d, _ in lasts[-1])]
    for row, begin, end in zip(table.to_dict("records"), firsts, ends, strict=True):
        want = brute([p[:3] for p in plain], begin, end)
        assert row["compute_ns"] == want["compute"]
        assert row["communication_ns"] == want["communication"]
        assert row["copy_ns"] == want["copy"]
        assert row["idle_host_ns"] + row["idle_graph_ns"] + row["idle_other_ns"] == want["idle"]


def test_idle_is_told_apart(tmp_path: Path) -> None:
    events, correlation = [], 0
    for n in range(6):
        at = 1000.0 * n
        events.append(host(f"ProfilerStep#{n}", at, 900.0, cat="user_annotation"))
        correlation += 2
        events.append(host("cudaGraphLaunch", at + 10, 40, correlation))
        events += [device(k, at + 60 + 103 * i, 100, correlation) for i, k in enumerate("abcd")]  # 3 µs between nodes
        events.append(host("cudaLaunchKernel", at + 600, 20, correlation + 1))  # the device is free from 469 on
        events.append(device("late", at + 625, 50, correlation + 1))
    table = lab.breakdown(lab.open_trace(write(tmp_path / "w.1.pt.trace.json", events)))
    row = table.iloc[3]
    assert row["period_ns"] == 1_000_000
    assert row["compute_ns"] == 450_000
    assert row["idle_graph_ns"] == 9_000
    # from 469 to 620 no launch had arrived, from 675 to the next step's launch at 1050 neither
    assert row["idle_host_ns"] == 151_000 + 375_000
    assert row["idle_other_ns"] == 5_000 + 10_000


def test_h200_blocking_adds_host_idle_and_nothing_between_nodes(h200: Path) -> None:
    none, blocking = (lab.breakdown(h200 / f"trace_{arm}.json.gz")[2:] for arm in ("none", "blocking"))
    assert none["idle_host_ns"].median() == 0
    assert blocking["idle_host_ns"].median() == pytest.approx(278_000, abs=15_000)
    assert blocking["idle_graph_ns"].median() == pytest.approx(none["idle_graph_ns"].median(), rel=0.02)


def two_ranks(folder: Path, late_us: float) -> Path:
    for rank in (0, 1):
        events = []
        for n in range(4):
            at, correlation = 1000.0 * n, n + 1
            shift = late_us if rank else 0.0
            events.append(host(f"ProfilerStep#{n}", at, 990.0, cat="user_annotation"))
            events.append(host("cudaGraphLaunch", at + 1, 5, correlation))
            events.append(device("gemm", at + 10, 200 + shift, correlation))
            events.append(device("ncclDevKernel_AllReduce_Sum", at + 212 + shift, 100 + late_us - shift, correlation))
        write(folder / f"rank{rank}.1.pt.trace.json", events, rank)
    return folder


def test_waiting_for_a_peer_is_the_time_beyond_the_quickest_rank(tmp_path: Path) -> None:
    traces = lab.open_trace(two_ranks(tmp_path, 70.0))
    table = lab.breakdown(traces).set_index(["rank", "step"])
    assert (table.loc[0, "peer_wait_ns"] == 70_000).all()
    assert (table.loc[1, "peer_wait_ns"] == 0).all()
    assert (table["communication_ns"] == 100_000).all()
    assert (lab.breakdown(traces[0])["peer_wait_ns"] == 0).all(), "one rank alone cannot know"
    assert len(match_collectives(traces)) == 8
    apart = clocks(traces)
    assert apart["offset_us"].abs().max() < 0.01
    assert (apart["num_collectives"] == 4).all()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("void deep_ep::internode_ll::dispatch<false, true, 7168>(void*, float*)", "DeepEP"),
        ("nvshmemi_transfer_rma", "nvshmem"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "custom all-reduce"),
        ("void sglang::one_shot_all_reduce_kernel<bf16>", "custom all-reduce"),
        ("rcclGenericKernel", "RCCL"),
        ("void at::native::vectorized_elementwise_kernel<4, x>", ""),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_NNT", ""),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", ""),
    ],
)
def test_what_counts_as_communication(name: str, label: str) -> None:
    assert comm_labels(pd.Series([name])).tolist() == [label]


def test_more_names_can_be_given() -> None:
    assert comm_labels(pd.Series(["my_a2a", "gemm"]), {"ours": "^my_"}).tolist() == ["ours", ""]


def test_steps_that_lack_device_events_get_no_parts(hostile: Path) -> None:
    table = lab.breakdown(hostile / "step_collapse")
    assert (table[NS] == -1).all().all()
    assert (table["withheld"] != "").all()
    lost = lab.breakdown(hostile / "hugedur")
    assert (lost["withheld"] != "").sum() == 1
    assert (lost.loc[lost["withheld"] == "", NS].sum(axis=1) == lost.loc[lost["withheld"] == "", "period_ns"]).all()


def test_deepep_is_communication(hostile: Path) -> None:
    assert (lab.breakdown(hostile / "deepep")["communication_total_ns"] > 0).any()


def test_an_empty_trace_has_all_columns(hostile: Path) -> None:
    table = lab.breakdown(hostile / "metaonly")
    assert tuple(table.columns) == COLUMNS
    assert not len(table)
    assert len(lab.lost(hostile / "metaonly")) == 0
    assert "lost_us" in lab.lost(hostile / "metaonly")


def test_a_wait_is_a_loss_only_as_far_as_the_device_ran_dry(h200: Path) -> None:
    def by_kind(arm: str) -> dict[str, float]:
        rows = lab.lost(h200 / f"{arm}.json.gz")
        rows = rows[rows["step"] >= 2]
        return (rows.groupby("kind")["lost_us"].sum() / 6).to_dict()

    assert by_kind("trace_none") == {"event_wait": 0.0}  # 1.1 ms of waiting a step, and nothing lost
    blocking = by_kind("trace_blocking")
    assert blocking["sync"] == pytest.approx(278, abs=15)  # of 1.4 ms of waiting
    assert blocking["event_wait"] == 0.0
    assert lab.lost(h200 / "trace_none.json.gz")["age_steps"].dropna().unique().tolist() == [2.0]
