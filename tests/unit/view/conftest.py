"""Small traces and runs for pictures: a fake capture with two graph launches a step, and a fake job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dspark_lab.config import preset
from dspark_lab.runs.record import Acceptance, Run
from dspark_lab.runs.spec import Progress
from dspark_lab.trace import open_trace

PERIOD, LEAD = 1000.0, {"none": 700.0, "blocking": -50.0}


def capture(folder: Path, *, blocking: bool = False, steps: int = 6, kernels: int = 10, gpu: bool = True) -> Path:
    """A Kineto file: every step launches a draft and a verify graph; the blocking one synchronises before."""
    events: list[dict[str, Any]] = []

    def add(name: str, cat: str, ts: float, dur: float, tid: int, **args: Any) -> None:
        pid = 0 if cat in ("kernel", "gpu_memcpy") else 1
        events.append({"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args})

    for n in range(steps):
        host = n * PERIOD
        add(f"ProfilerStep#{n}", "user_annotation", host, PERIOD - 10, 1)
        if gpu and blocking:
            add("cudaStreamSynchronize", "cuda_runtime", host + 50, 330, 1, correlation=10 * n + 1)
        for phase, at in (("draft", 400.0), ("verify", 600.0)):
            correlation = 10 * n + (phase == "verify") + 2
            if not gpu:
                add(f"dspark::{phase}", "user_annotation", host + at, 150, 1)
                add("aten::mm", "cpu_op", host + at + 5, 100, 1)
                continue
            add("cudaGraphLaunch", "cuda_runtime", host + at, 50, 1, correlation=correlation)
            start = host + (400 if blocking else 1150) + (60 if phase == "draft" else 340)
            each = (260 if phase == "draft" else 600) / kernels
            for k in range(kernels):
                name = "ncclDevKernel_AllReduce" if k == 3 else "void ns::gemm_kernel<float>(int)"
                add(name, "kernel", start + k * each, each, 7, correlation=correlation, stream=7, device=0)
    name = f"{'blocking' if blocking else 'none'}{'' if gpu else '_cpu'}_rank0.pt.trace.json"
    path = folder / name
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def measured(
    alloc: str,
    *,
    ms: float = 3.0,
    traces: tuple[Path, ...] = (),
    device: str = "cuda",
    num_processes: int = 3,
    **more: Any,
) -> Run:
    rows = [
        {"process": p, "repeat": r, "step": s, "rank": 0, "profiled": False, "step_us": ms * 1e3 + (s % 5) + (p % 2), "host_us": 100.0,
         "num_requests": 4, "num_committed": 12}
        for p in range(num_processes) for r in range(2) for s in range(12)
    ]  # fmt: skip
    settings: dict[str, Any] = {
        "name": f"tiny-{alloc}", "config": preset("tiny", alloc=alloc), "source": "measured", "steps": pd.DataFrame(rows),
        "environment": {"device": device, "device_name": "Test GPU" if device == "cuda" else "Test CPU", "recorded_at": "2026-11-29"},
        "acceptance": Acceptance(accepted=(10, 20, 30, 20, 10, 10), proposed=(0, 0, 0, 0, 0, 100)), "trace_paths": traces,
    }  # fmt: skip
    return Run(**{**settings, **more})


@pytest.fixture
def traces(tmp_path: Path) -> dict[str, Any]:
    return {"none": open_trace(capture(tmp_path)), "blocking": open_trace(capture(tmp_path, blocking=True))}


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    none, blocking = capture(tmp_path), capture(tmp_path, blocking=True)
    return [measured("none", ms=3.0, traces=(none,)), measured("blocking", ms=3.3, traces=(blocking,))]


class FakeJob:
    """Ends after ``looks`` polls, or when stopped; ``error`` makes it fail."""

    def __init__(self, runs: list[Run], *, looks: int = 3, error: Any = None) -> None:
        self._runs, self._looks, self.error, self.runs = runs, looks, error, []
        self.stopped, self.seen = False, 0

    def poll(self) -> Progress:
        self.seen += 1
        if self.stopped or self.seen > self._looks:
            state = "failed" if self.error else "stopped" if self.stopped else "complete"
            self.runs = self._runs
            return Progress(state=state, fraction=1.0, message=str(self.error or state))
        return Progress(state="running", fraction=self.seen / 10, arm="blocking", step=self.seen, num_steps=64)

    def stop(self) -> None:
        self.stopped = True
