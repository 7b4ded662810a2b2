"""Look-alikes of what SGLang, vLLM and ROCm write, traces of the CPU alone, and the ways to open them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_lab.errors import LabError
from dspark_lab.trace import open_trace, summarize
from dspark_lab.trace.summary import integrity

PUBLIC = os.environ.get("DSPARK_LAB_PUBLIC_TRACES")


def decode_loop(made, label: str, prefix: str = "hip", num_steps: int = 4):
    """Steps of 1000 µs: one eager kernel, then a graph launch of 100 µs whose first kernel starts 40 µs after it."""
    trace = made(prefix)
    for step in range(num_steps):
        t = 1000.0 * step
        trace.mark(label.format(step=step), t, 900)
        trace.device("fill", t + 15, 2, trace.call("LaunchKernel", t + 5, 5))
        launch = trace.call("GraphLaunch", t + 100, 100)
        for k in range(3):
            trace.device(f"gemm{k}", t + 240 + 50 * k, 40, launch)
    return trace


@pytest.mark.parametrize(
    ("label", "source"),
    [
        ("step[DECODE bs=32]", "SGLang step label"),
        ("step[decode bs=8]", "SGLang step label"),
        ("step[TARGET_VERIFY bs=4]", "SGLang step label"),
        ("execute_context_0(0)_generation_32(32)", "vLLM execute_context label"),
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
            "vLLM execute_context label",
        ),
        ("gpu_model_runner: execute_model", "vLLM execute_model label"),
        ("ProfilerStep#{step}", "ProfilerStep"),
    ],
)
def test_engine_labels(made, write, label, source):
    trace = open_trace(write(decode_loop(made, label).content()))
    assert trace.integrity.steps_source == source
    assert trace.vendor == "rocm"
    found = summarize(trace)
    assert (found["num_steps"], found["step_us_p50"], found["kernels_per_step"]) == (4, 682.5, 4)
    assert found["launch_lead_us_p50"] == 40.0
    assert trace.steps()["period_us"].tolist() == [1000, 1000, 1000, 365]


def test_an_outer_engine_label_is_no_second_step(made, write):
    trace = decode_loop(made, "step[DECODE bs=32]")
    for step in range(4):
        trace.mark("execute_32_context_0(0)_generation_32(32)", 1000.0 * step - 20, 950)
    opened = open_trace(write(trace.content()))
    assert len(opened.steps()) == 4
    assert set(opened.phases()["name"]) == {"execute_32_context_0(0)_generation_32(32)"}


def test_nested_steps_count_once(made, write):
    trace = decode_loop(made, "ProfilerStep#{step}").mark("ProfilerStep#9", 100, 50)
    opened = open_trace(write(trace.content()))
    assert opened.steps()["step"].tolist() == [0, 1, 2, 3]
    assert any("inside another" in m for m in opened.integrity.messages)


def test_a_gap_in_the_profilers_numbers_ends_a_period(made, write):
    content = decode_loop(made, "ProfilerStep#{step}").content()
    for e in content["traceEvents"]:
        e["name"] = {"ProfilerStep#2": "ProfilerStep#12", "ProfilerStep#3": "ProfilerStep#13"}.get(e["name"], e["name"])
    assert open_trace(write(content)).steps()["period_us"].tolist() == [1000, 365, 1000, 365]


def test_events_belong_to_the_step_that_launched_them(made, write):
    trace = made()
    for step in range(3):  # kernels run a whole step behind the host
        trace.mark(f"ProfilerStep#{step}", 100.0 * step, 90)
        trace.device("late", 1000 + 300.0 * step, 200, trace.call("LaunchKernel", 100.0 * step + 5, 5))
    opened = open_trace(write(trace.content()))
    steps = opened.steps()
    assert steps["period_us"].tolist() == [300, 300, 200]
    assert steps["num_kernels"].tolist() == [1, 1, 1]
    assert steps["launch_lead_us"].tolist() == [990, 1190, 1390]


def test_blocking_copies_are_classed_by_what_they_did(made, write):
    trace = made("")
    trace.mark("ProfilerStep#0", 0, 10_000)

    def copy(call, kind, at, call_dur, starts, dur):
        trace.device(f"Memcpy {kind}", starts, dur, trace.call(call, at, call_dur), cat="gpu_memcpy", bytes=4)

    copy("hipMemcpyWithStream", "DtoH (Device -> Host)", 100, 500, 590, 5)  # waits
    copy("cudaMemcpyAsync", "HtoD (Pageable -> Device)", 1000, 12, 1900, 1)  # returns at once
    copy("cudaMemcpyAsync", "HtoD (Pageable -> Device)", 2000, 21, 2018, 1)  # outlasts its copy on an idle device
    copy("cudaMemcpyAsync", "DtoH (Device -> Pageable)", 3000, 20, 3010, 2)  # waits: the host needs the bytes
    copy("cudaMemcpyAsync", "DtoD (Device -> Device)", 4000, 200, 4100, 2)  # slow, but nothing to wait for
    copy("cudaMemcpyAsync", "DtoH (Device -> Pinned)", 5000, 200, 5100, 2)
    copy("cudaMemcpy", "DtoH (Device -> Pinned)", 6000, 200, 6190, 2)  # waits
    copy("cudaMemcpyAsync", "HtoD (Pageable -> Device)", 7000, 300, 7200, 90)  # staged: waits
    opened = open_trace(write(trace.content()))
    waits = opened.waits()
    assert set(waits["kind"]) == {"blocking_copy"}
    assert ((waits["ts_ns"] - opened.t0_ns) / 1000).tolist() == [100, 3000, 6000, 7000]
    assert opened.memcpy()["is_blocking"].tolist() == [True, False, False, True, False, False, True, True]
    assert opened.steps()["blocking_copy_us"].tolist() == [500 + 20 + 200 + 300]
    assert opened.memcpy()["kind"][0] == "DtoH (Device -> Host)"


def test_sites(made, write):
    trace = made().mark("ProfilerStep#0", 0, 100).mark("ProfilerStep#1", 100, 100)
    trace.span("python_function", "engine/decode.py(12): step", 5, 90)
    trace.span("python_function", "torch/cuda/streams.py(245): synchronize", 10, 30)
    trace.span("python_function", "<built-in method synchronize of Event object at 0x7f>", 11, 20)
    trace.call("EventSynchronize", 12, 15)
    trace.span("cpu_op", "aten::item", 110, 20).span("cpu_op", "aten::_local_scalar_dense", 112, 16)
    trace.call("StreamSynchronize", 115, 10)
    trace.call("DeviceSynchronize", 150, 10)
    trace.call("StreamSynchronize", 160, 5, tid=2)
    waits = open_trace(write(trace.content())).waits()
    assert waits["site"].tolist() == [
        "engine/decode.py:12 step",
        "aten::item > aten::_local_scalar_dense",
        "cudaDeviceSynchronize #1",
        "cudaStreamSynchronize #1",
    ]
    assert waits["kind"].tolist() == ["event_wait", "sync", "sync", "sync"]
    assert waits["step"].tolist() == [0, 1, 1, 1]


def test_only_looks_that_held_the_launching_thread_are_a_wait(made, write):
    trace = made()
    for step in range(4):
        at = 1000.0 * step
        trace.mark(f"ProfilerStep#{step}", at, 999)
        launch = trace.call("LaunchKernel", at + 1, 5)
        trace.device("gemm", at + 10, 300, launch)
        trace.call("HostAlloc", at + 10, 5)
        trace.call("EventQuery", at + 16, 1)  # an allocator's
        trace.call("EventQuery", at + 18, 1)
        trace.call("EventRecord", at + 30, 2)
        for look in range(5 if step > 1 else 1):
            trace.call("EventQuery", at + 40 + 60 * look, 2)
            trace.call("GetLastError", at + 43 + 60 * look, 1)
        for look in range(8):
            trace.call("EventQuery", at + 20 + 100 * look, 2, tid=9)  # a watchdog's
    waits = open_trace(write(trace.content())).waits()
    assert waits["name"].unique().tolist() == ["cudaEventQuery"]
    assert waits["dur_us"].tolist() == [2, 2, 242, 242]
    assert waits["num_looks"].tolist() == [1, 1, 5, 5]
    assert waits["site"].tolist() == ["cudaEventQuery #1"] * 4


def test_cpu_alone(made, write):
    trace = made()
    for step in range(3):
        trace.mark(f"ProfilerStep#{step}", 1000.0 * step, 800 + step)
        trace.mark("dspark::draft", 1000.0 * step + 10, 300).span("cpu_op", "aten::mm", 1000.0 * step + 20, 100)
    opened = open_trace(write(trace.content()))
    found = summarize(opened)
    assert (opened.is_cpu_only, opened.vendor) == (True, None)
    assert (found["step_us_p50"], found["launch_lead_us_p50"], found["kernels_per_step"]) == (802.0, None, 0)
    assert opened.steps()["period_us"].tolist() == [800, 801, 802]
    assert opened.steps()["launch_lead_us"].map(math.isnan).all()
    assert opened.phases()[["step", "name"]].values.tolist() == [[i, "dspark::draft"] for i in range(3)]
    assert opened.ops()["step"].tolist() == [0, 1, 2]


def test_kernels_without_any_call(made, write):
    trace = made().mark("ProfilerStep#0", 0, 100).mark("ProfilerStep#1", 100, 100)
    trace.device("a", 10, 20, 1).device("b", 110, 20, 2)
    opened = open_trace(write(trace.content()))
    assert opened.steps()["num_kernels"].tolist() == [1, 1]
    assert any("no runtime calls" in m for m in opened.integrity.messages)
    assert len(opened.waits()) == 0


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("dp0_pp0_tp0_dcp0_ep0_rank3.123.pt.trace.json", 3),
        ("1757-TP-5.trace.json", 5),
        ("trace-rank-2.json", 2),
        ("arm_rank1.json", 1),
        ("1757-TP-4-EP-1.json", 4),
        ("host_17.1.pt.trace.json", 0),
    ],
)
def test_rank_from_the_file_name(sound, write, name, rank):
    trace = open_trace(write(sound.replace('"rank": 0, ', ""), name))
    assert trace.rank == rank
    assert any(f"taken as {rank}" in m for m in trace.integrity.messages)


def test_ranks_by_order_and_files_that_are_no_traces(sound, write):
    for name in ("a.pt.trace.json", "b.pt.trace.json"):
        path = write(sound.replace('"rank": 0, ', ""), name)
    write('{"schema": 1}', "run.json")
    ranks = open_trace(path.parent)
    assert list(ranks) == [0, 1]
    assert "run.json" in ranks.messages[0]


def test_runs_and_traces_are_opened_too(sound, write):
    one, two = write(sound, "x/rank0.json"), write(sound.replace('"rank": 0', '"rank": 1'), "x/rank1.json")
    assert list(open_trace(SimpleNamespace(trace_paths=[one, two]))) == [0, 1]
    trace = open_trace(SimpleNamespace(trace_paths=[one]))
    assert trace.path == one
    assert open_trace(trace) is trace
    with pytest.raises(LabError, match="without the profiler"):
        open_trace(SimpleNamespace(trace_paths=[], name="run-1"))
    write(sound, "job/traces/rank0.pt.trace.json")
    assert list(open_trace(one.parent.parent / "job")) == [0]


@pytest.mark.skipif(PUBLIC is None, reason="DSPARK_LAB_PUBLIC_TRACES is not set: the public captures are not shipped")
@pytest.mark.parametrize(
    ("name", "num_steps", "vendor", "kernels", "wait"),
    [
        ("sglang_qwen3-8b_decode", 1, "rocm", 550, "blocking_copy"),
        ("vllm_decode_graph", 1, "rocm", 425, "event_wait"),
        ("hta_sampled_rank-0", 2, "cuda", 577, "blocking_copy"),
        ("hta_sampled_rank-1", 2, "cuda", 552, "blocking_copy"),
    ],
)
def test_public_captures(name, num_steps, vendor, kernels, wait):
    trace = open_trace(Path(PUBLIC or "") / f"{name}.json.gz")
    found = summarize(trace)
    assert (found["num_steps"], trace.vendor, found["kernels_per_step"]) == (num_steps, vendor, kernels)
    assert found["step_us_p50"] > 0
    assert found["waits"][0]["kind"] == wait
    if name.startswith("sglang"):
        assert found["waits"][0]["total_us"] == pytest.approx(463064, abs=1)
        assert "cuda_graph_runner.py:276" in found["waits"][0]["site"]


def test_missing_ranks_and_other_disagreements_are_told(sound, write):
    for rank in (0, 2):
        path = write(
            sound.replace('"rank": 0, "world_size": 1', f'"rank": {rank}, "world_size": 4'), f"r/rank{rank}.json"
        )
    ranks = open_trace(path.parent)
    assert ranks.missing_ranks == (1, 3)
    assert any("2 of 4 ranks are here; missing: 1, 3" in m for m in ranks.messages)
    assert integrity(ranks)["problems"] == ["ranks 1, 3 are missing"]
    write(
        sound.replace('"rank": 0, "world_size": 1', '"rank": 1, "world_size": 2').replace("ProfilerStep#7", "other"),
        "r/rank1.json",
    )
    said = " ".join(open_trace(path.parent).messages)
    assert "different world sizes: 2, 4" in said
    assert "different numbers of steps: rank 0 3, rank 1 2" in said
