"""The guards that read a profile, without a GPU: their judgement on recorded captures, and what they say here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark_lab.errors import LabError
from dspark_lab.guards import GuardError
from dspark_lab.testing import max_kernels, min_launch_lead_us, same_kernels_as
from dspark_lab.testing.profiled import ProfiledGuard, kernel_name, launching_functions, replay_differences, replays
from dspark_lab.trace import open_trace


@pytest.fixture(scope="module")
def captures(h200):
    def load(name: str):
        (path,) = [p for p in h200.rglob("*") if p.is_file() and p.name.startswith(f"{name}.")]
        return open_trace(path)

    return load


def judged(guard: ProfiledGuard, trace) -> None:
    """What the guard says of a region that gave this trace."""
    from dspark_lab.guards import HostSyncGuard

    guard.place = "engine.py:7 (test)"
    guard._waits = HostSyncGuard(watch_only=True)
    guard.judge(trace)


def test_kernel_names():
    cases = {
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int, at::native::FillFunctor<int>)": "at::native::vectorized_elementwise_kernel",
        "void at::native::(anonymous namespace)::softmax_warp_forward<float, (int)3>(float*)": "at::native::{anonymous}::softmax_warp_forward",
        "triton_poi_fused_add_0": "triton_poi_fused_add_0",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    }
    assert {k: kernel_name(k) for k in cases} == cases


def test_launch_lead_tells_the_arms_apart(captures):
    judged(min_launch_lead_us(100), captures("trace_none"))
    with pytest.raises(
        GuardError, match=r"engine.py:7 \(test\): launch lead -2\d\d µs \(median of 6 steps\), at least 100 µs wanted"
    ):
        judged(min_launch_lead_us(100), captures("trace_blocking"))


def test_kernels_are_counted_in_graphs_too(captures):
    trace = captures("trace_none")
    kernels = trace.kernels()
    judged(max_kernels(len(kernels)), trace)
    with pytest.raises(
        GuardError,
        match=rf"{len(kernels)} kernels were run, at most {len(kernels) - 1} allowed \(\d+ of them inside graphs\)",
    ):
        judged(max_kernels(len(kernels) - 1), trace)


def test_functions_that_launch(captures):
    trace = captures("one_bs1_hw0_blocking_stack_rank0")
    places = launching_functions(trace, trace.kernels())
    assert sum(places.values()) == len(trace.kernels())
    place, count = places.most_common(1)[0]
    assert ".py(" in place
    assert "torch/" not in place
    assert count > 100


def test_the_same_kernels(captures):
    none, blocking = captures("trace_none"), captures("trace_blocking")
    assert len(replays(none)) >= 1
    judged(same_kernels_as(none), blocking)
    judged(same_kernels_as(none, ordered=True), none)
    with pytest.raises(GuardError, match="the graphs hold other kernels than the reference"):
        judged(same_kernels_as(none), captures("tp2_bs1_hw0_none_rank0"))


def test_differences_are_told_kernel_by_kernel():
    a, b = ("gemm", "add", "norm"), ("gemm", "gemm", "norm")
    assert replay_differences([a], [a]) == []
    assert replay_differences([a], [b]) == ["in the replay of 3 kernels (3 here):", "-1 add", "+1 gemm"]
    assert replay_differences([a], [a[::-1]]) == []
    assert (
        replay_differences([a], [a[::-1]], ordered=True)[1]
        == "another order from kernel 0 on: gemm expected, norm found"
    )
    assert replay_differences([a, b], [a]) == ["a replay of 3 kernels, first gemm, is not there"]
    assert replay_differences([a], [a, b]) == ["a replay of 3 kernels, first gemm, is not in the reference"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_they_say_so(captures):
    for guard in (max_kernels(3), min_launch_lead_us(3), same_kernels_as(captures("trace_none"))):
        with pytest.raises(LabError, match="needs a CUDA device"), guard:
            pass


CI = """
import pytest, torch

pytest_plugins = ["dspark_lab.testing"]

def step(x):
    return x.sum().item()

def test_waits(no_host_sync, cuda_or_fake):
    x = torch.ones(3, device=cuda_or_fake)
    with no_host_sync():
        step(x)

def test_may_wait(no_host_sync, no_device_alloc, cuda_or_fake):
    x = torch.ones(3, device="cuda")
    with no_host_sync(allow="step"), no_device_alloc(allow="step"):
        step(x)

def test_forgot(no_host_sync):
    pass

def test_counts(max_kernels):
    with max_kernels(3):
        torch.ones(3, device="cuda").add_(1)
"""


def test_the_fixtures_in_a_project_of_its_own(tmp_path: Path):
    (tmp_path / "test_engine.py").write_text(CI)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200).stdout
    assert "test_engine.py:7 (step): x.sum().item(): copies one number to the host" in out, out
    assert "the test asked for no_host_sync and never entered it" in out
    here = "1 failed, 3 passed, 1 error" if torch.cuda.is_available() else "1 failed, 2 passed, 1 skipped, 1 error"
    assert here in out
    if not torch.cuda.is_available():
        assert "max_kernels reads a profile of the device: needs a CUDA device" in out


def test_the_plugin_is_light():
    code = "import sys, dspark_lab.testing; assert not {'torch', 'pandas', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
