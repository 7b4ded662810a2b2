"""Time and memory of the trace analyser on large captures, beside another tool: ``python tests/bench/traces.py --help``.

Each figure is of a process of its own (start and imports included): wall time, processor time, peak resident memory, least of the repeats;
tools take turns within a repeat. The captures are made here: decode steps whose kernels have a launch each (``eager``), lie in two graphs
a step (``graph``), or that with Python frames (``stacks``).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS = (
    "import sys, dspark_lab as lab; t = lab.open_trace(sys.argv[1], cache={cache}); lab.integrity(t); lab.summarize(t)"
)
HTA = """
import logging, os, sys, tempfile
logging.disable(logging.CRITICAL)
folder = tempfile.mkdtemp()
os.symlink(os.path.abspath(sys.argv[1]), folder + "/rank0.json.gz")
from hta.trace_analysis import TraceAnalysis
found = TraceAnalysis(trace_dir=folder)
found.get_temporal_breakdown(visualize=False)
found.get_idle_time_breakdown(visualize=False)
found.get_gpu_kernel_breakdown(visualize=False)
"""
KERNELS = (
    "gemm_bf16_64x128",
    "void attention::flash_fwd<128, true>(Params)",
    "void at::native::vectorized_elementwise_kernel<4, Add>(int, Add)",
    "rms_norm",
)


def events(num: int, kind: str, rank: int) -> Iterator[dict[str, Any]]:
    """Events of decode steps until there are ``num``."""
    rnd = random.Random(rank)
    host = device = 5.0e9
    made = correlation = step = 0

    def span(cat: str, name: str, ts: float, dur: float, tid: int, **args: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 0 if cat == "kernel" else 100 + rank,
            "tid": tid,
            "ts": round(ts, 3),
            "dur": round(dur, 3),
            "args": args,
        }

    while made < num:
        begin, out = host, []
        if kind == "stacks":
            out += [
                span(
                    "python_function",
                    f"engine/decode.py({d + 40}): step",
                    host,
                    3000.0,
                    1,
                    **{"Python id": 16 * step + d},
                )
                for d in range(12)
            ]
        for size in [1] * (200 if kind == "eager" else 20) + ([] if kind == "eager" else [110, 480]):
            correlation += 1
            call, cost = ("cudaGraphLaunch", 200.0) if size > 1 else ("cudaLaunchKernel", 3.0)
            if size == 1:
                out.append(span("cpu_op", "aten::mm", host, 8.0, 1, **{"External id": correlation}))
            out.append(span("cuda_runtime", call, host + 1, cost, 1, correlation=correlation))
            out.append(
                {
                    "ph": "s",
                    "id": correlation,
                    "pid": 100 + rank,
                    "tid": 1,
                    "ts": round(host + 2, 3),
                    "cat": "ac2g",
                    "name": "ac2g",
                }
            )
            device = max(device, host + 5)
            for _ in range(size):
                dur = rnd.uniform(1, 6)
                out.append(
                    span("kernel", rnd.choice(KERNELS), device, dur, 7, device=0, stream=7, correlation=correlation)
                )
                device += dur + 0.8
            host += cost + 4
        out.append(span("cuda_runtime", "cudaEventSynchronize", host, max(3.0, device - host - 5000), 1, correlation=0))
        host = max(host + 5, device - 4000)
        out.append(span("user_annotation", f"ProfilerStep#{step}", begin - 1, host - begin, 1))
        yield from out
        made, step = made + len(out), step + 1


def write(path: Path, num: int, kind: str, rank: int = 0) -> Path:
    """A capture of ``num`` events at ``path``, gzip."""
    head = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8},
        "deviceProperties": [{"id": 0, "name": "made"}],
    }
    with gzip.open(path, "wt", compresslevel=3) as f:
        f.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for i, event in enumerate(events(num, kind, rank)):
            f.write((",\n" if i else "") + json.dumps(event))
        f.write("\n]}")
    return path


def measure(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[float, float, float] | None:
    """(wall s, processor s, peak MB) of a command and its largest child; None where it fails or exceeds the limit."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        wall = time.perf_counter() - begin
        if pid:
            process.returncode = status
            return (wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024) if status == 0 else None
        if wall > limit_s:
            process.kill()
            process.wait()
            return None
        time.sleep(0.01)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--events", type=int, default=1_000_000)
    ask.add_argument("--kinds", default="eager,graph", help="eager, graph, stacks, with commas")
    ask.add_argument("--ranks", type=int, default=1, help="files in a folder, read as ranks of one job")
    ask.add_argument("--repeats", type=int, default=2)
    ask.add_argument("--hta", help="a Python that has HolisticTraceAnalysis, to measure it on the same files")
    ask.add_argument("--limit-s", type=float, default=600.0)
    given = ask.parse_args()
    print(
        f"| capture | tool | wall s | processor s | peak MB |\n|---|---|---|---|---|  <!-- {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} -->"
    )
    with tempfile.TemporaryDirectory() as tmp:
        cache = {"DSPARK_LAB_CACHE": f"{tmp}/cache", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        for kind in given.kinds.split(","):
            if given.ranks == 1:
                source = write(Path(tmp) / f"{kind}.json.gz", given.events, kind)
            else:
                source = Path(tmp) / kind
                source.mkdir()
                for rank in range(given.ranks):
                    write(source / f"rank{rank}.json.gz", given.events, kind, rank)
            ours = [sys.executable, "-c"]
            tools = {
                "dspark_lab": ([*ours, OURS.format(cache=False), str(source)], {**cache, "DSPARK_LAB_CACHE": "off"})
            }
            tools["dspark_lab, from its cache"] = ([*ours, OURS.format(cache=True), str(source)], cache)
            measure(*tools["dspark_lab, from its cache"], given.limit_s)  # fills it
            if given.hta and given.ranks == 1:
                tools["HTA"] = ([given.hta, "-c", HTA, str(source)], {})
            found: dict[str, list[tuple[float, float, float] | None]] = {name: [] for name in tools}
            for _ in range(given.repeats):
                for name, (command, environment) in tools.items():
                    found[name].append(measure(command, environment, given.limit_s))
            for name, runs in found.items():
                told = [r for r in runs if r]
                cells = (
                    [f"{min(r[k] for r in told):.{1 if k < 2 else 0}f}" for k in range(3)]
                    if told
                    else ["failed or over the limit", "", ""]
                )
                print(f"| {kind}, {given.ranks} × {given.events:,} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
