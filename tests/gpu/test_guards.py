"""The guards on a real device: the table of waits against PyTorch's own watch, the foreign loop, and those that read a profile."""

from __future__ import annotations

import importlib.util
import math
import re
import runpy
import statistics
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dspark_lab.guards import GuardError, HostSyncGuard, no_device_alloc, no_host_sync
from dspark_lab.testing import max_kernels, min_launch_lead_us, same_kernels_as

FOLDER = Path(__file__).parents[1] / "unit" / "guards"
LOOP = FOLDER / "foreign_loop.py"
CASES = runpy.run_path(str(FOLDER / "cases.py"))
DEVICE = torch.device("cuda", 0)


@pytest.fixture(params=[False, True], ids=["grad", "inference"])
def inference(request):
    with torch.inference_mode(request.param):
        yield


def torch_sees(code: str, space: dict[str, Any]) -> bool:
    """Whether PyTorch's sync debug mode objects."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eval(code, space)
    except RuntimeError as e:
        if "synchroniz" not in str(e):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def guard_sees(code: str, space: dict[str, Any]) -> bool:
    try:
        with no_host_sync():
            eval(code, space)
    except GuardError:
        return True
    return False


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("code", CASES["FAIL"] + CASES["PASS"])
def test_the_table_agrees_with_pytorch(inference, code):
    waits = code in CASES["FAIL"]
    found = guard_sees(code, CASES["names"](DEVICE)), torch_sees(code, CASES["names"](DEVICE))
    assert found == (waits, waits and code not in CASES["UNSEEN_BY_TORCH"])


def test_what_has_no_name_is_seen_by_pytorch_and_gets_a_line():
    a = torch.eye(3, device=DEVICE)
    with (
        pytest.raises(
            GuardError, match=r"test_guards\.py:\d+ \(\S+\): torch\.linalg\.inv\(a\): synchronises with the device"
        ),
        no_host_sync(),
    ):
        torch.linalg.inv(a)
    with HostSyncGuard(watch_only=True) as guard:
        a.sum().item()
        torch.cuda.synchronize()
    assert [(f.kind, f.call) for f in guard.findings] == [
        ("sync", "a.sum().item()"),
        ("sync", "torch.cuda.synchronize()"),
    ]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_the_mode_set_before_comes_back(mode):
    x = torch.ones(2, device=DEVICE)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        with no_host_sync(allow="test_the_mode_set_before_comes_back"), no_host_sync(at_once=False, allow="item"):
            x.add_(1)
        with pytest.raises(GuardError), no_host_sync():
            x.sum().item()
        assert torch.cuda.get_sync_debug_mode() == mode
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_other_threads_may_wait():
    x = torch.ones(2, device=DEVICE)
    said: list[float] = []
    with no_host_sync():
        thread = threading.Thread(target=lambda: said.append(x.sum().item()))
        thread.start()
        thread.join()
    assert said == [2.0]


def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("foreign_loop", LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["foreign_loop"] = module
    spec.loader.exec_module(module)
    return module


def test_the_planted_loop_fails_with_file_and_line(inference):
    text = LOOP.read_text()
    planted = {m[1]: text[: m.start()].count("\n") + 1 for m in re.finditer(r"^.*# PLANT (\w+)$", text, re.MULTILINE)}
    engine = loop().Planted(DEVICE)
    engine.step()
    at = rf"foreign_loop\.py:{planted['scalar']} \(Planted\.make_batch\): torch\.tensor\(num_tokens, "
    with pytest.raises(GuardError, match=at), no_host_sync():
        engine.step()
    with pytest.raises(GuardError) as caught, no_host_sync(at_once=False):
        engine.step()
    assert {f.line for f in caught.value.findings} == set(planted.values())


def test_the_mended_loop_passes_and_says_the_same(inference):
    module = loop()
    planted, mended = module.Planted(DEVICE), module.Mended(DEVICE)
    for _ in range(30):
        planted.step()
    with no_host_sync(allow_pageable_staging=False) as guard:
        for _ in range(30):
            mended.step()
    assert guard.counts() == {"event_wait": 28}
    for _ in range(2):
        mended.retire()
    said = [[r.output_ids for r in (*s.done, *s.running)] for s in (planted, mended)]
    assert said[0] == said[1]


def captured(work, repeats: int = 1) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return graph


def test_allocations(inference):
    x = torch.zeros(1024, device=DEVICE)
    out = torch.empty_like(x)
    graph = captured(lambda: x.add_(1))
    with no_device_alloc():
        x.mul_(2)
        torch.add(x, x, out=out)
        graph.replay()
    with (
        pytest.raises(
            GuardError, match=r"test_guards\.py:\d+ \(test_allocations\): x \+ 1: a new device tensor of 4,096 bytes"
        ),
        no_device_alloc(),
    ):
        x + 1
    with no_device_alloc(segments_only=True):
        x + 1
    with pytest.raises(GuardError, match="for which the driver was asked"), no_device_alloc(segments_only=True):
        torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    torch.cuda.empty_cache()


def test_kernels_are_counted_inside_graphs():
    x = torch.zeros(1024, device=DEVICE)
    graph = captured(lambda: x.add_(1), repeats=3)
    with max_kernels(4):
        graph.replay()
        x.add_(1)
    with pytest.raises(GuardError) as caught, max_kernels(3):  # noqa: PT012
        graph.replay()
        x.add_(1)
    message = str(caught.value)
    assert re.search(
        r"test_guards\.py:\d+ \(\S+\): 4 kernels were run, at most 3 allowed \(3 of them inside graphs\)", message
    )
    assert re.search(r"\dx .*test_guards\.py\(\d+\): test_kernels_are_counted_inside_graphs", message), message
    assert "4x at::native::vectorized_elementwise_kernel" in message


def test_launch_lead():
    """Steps of 10 to 20 ms on the device. The threshold is far above what other processes on the same GPU add to a lead: a kernel
    launched on an idle stream waits there until their time slices are over."""
    w = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(w)
    wanted = 30_000

    def leads(guard: min_launch_lead_us, *, wait: bool) -> list[float]:
        with guard:
            for _ in range(10):
                with guard.step():
                    for _ in range(12):
                        torch.mm(w, w, out=y)
                    if wait:
                        y[0, 0].item()
        assert guard.trace is not None
        assert guard.trace.launches()["num_kernels"].sum() == len(guard.trace.kernels()) >= 120  # every launch is known
        return guard.trace.steps()["launch_lead_us"].tolist()

    blocked = leads(min_launch_lead_us(-math.inf), wait=True)
    assert statistics.median(blocked[2:]) < wanted, blocked
    leads(min_launch_lead_us(wanted), wait=False)
    with pytest.raises(GuardError) as caught:
        leads(min_launch_lead_us(wanted), wait=True)
    message = str(caught.value)
    assert re.search(
        r"launch lead -?\d+ µs \(median of 8 steps\), at least 30000 µs wanted\. The host waited at:", message
    ), message
    assert re.search(r"10x \S*test_guards\.py:\d+ \(test_launch_lead\.leads\): y\[0, 0\]\.item\(\)", message), message


def test_the_same_kernels():
    x = torch.zeros(1024, device=DEVICE)
    graph = captured(lambda: x.add_(1).mul_(2))
    other = captured(lambda: x.add_(1).cumsum_(0))
    with max_kernels(1000) as recorded:
        graph.replay()
    with same_kernels_as(recorded.trace):
        for _ in range(3):
            graph.replay()
        x.sum()
    others = "the graphs hold other kernels than the reference"
    with pytest.raises(GuardError, match=others), same_kernels_as(recorded.trace):
        other.replay()
