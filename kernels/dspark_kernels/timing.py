"""Timing for the benches: graph replays over rotating inputs, and the read bandwidth that floors are counted against."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a bench's table."""

    op: str
    way: str
    """Which implementation; losers stay."""
    shape: str
    dtype: str
    p20_us: float
    p50_us: float
    p80_us: float
    floor_us: float
    """Bytes that must be read over measured read bandwidth."""
    note: str = ""

    @property
    def ratio(self) -> float:
        """Median over floor."""
        return self.p50_us / self.floor_us if self.floor_us else float("nan")


def graph_us(
    fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], *, replays: int = 30, calls: int | None = None
) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile of one call's microseconds.

    ``fn(*sets[i])`` is captured ``calls`` times (a multiple of the sets where None: at least 8) in one CUDA graph, set
    after set, and the graph is replayed; a replay over its calls is one sample. Weights that should come from memory
    need sets whose bytes are several times the L2.
    """
    calls = calls or len(sets) * -(-8 // len(sets))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in sets[:2]:
            fn(*args)
            fn(*args)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            fn(*sets[i % len(sets)])
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    took = sorted(start.elapsed_time(end) * 1e3 / calls for start, end in events)
    del graph
    p20, p50, p80 = (took[int(share * (len(took) - 1))] for share in (0.2, 0.5, 0.8))
    return p20, p50, p80


def kernels_us(fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Mean microseconds a call by kernel, profiled: what each of them takes, not what they take together."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        for args in sets:
            fn(*args)
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / len(sets) for event in prof.key_averages() if event.device_time_total}


def read_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes a second this GPU reads: the best of a float32 sum, a maximum and a copy (bytes read and written)."""
    data = torch.randn(num_bytes // 4, device="cuda")
    other = torch.empty_like(data)
    ways = [(data.sum, num_bytes), (data.amax, num_bytes), (lambda: other.copy_(data), 2 * num_bytes)]
    return max(moved / (graph_us(way, [()], replays=10, calls=2)[0] * 1e-6) for way, moved in ways)


def environment() -> dict[str, str]:
    """GPU and versions, for the head of a table."""
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "none"
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton_version}


def report(rows: Sequence[Row], bandwidth: float, path: Path | None = None) -> None:
    """Prints the table and, where ``path`` is given, writes it as JSON."""
    about = environment()
    print(" · ".join(f"{name} {value}" for name, value in about.items()), f"· reads {bandwidth / 1e12:.2f} TB/s")
    print(f"{'op':<16}{'way':<30}{'shape':<34}{'dtype':<10}{'p20':>8}{'p50':>8}{'p80':>8}{'floor':>8}{'ratio':>7}")
    for row in rows:
        times = "".join(f"{us:>8.1f}" for us in (row.p20_us, row.p50_us, row.p80_us, row.floor_us))
        print(f"{row.op:<16}{row.way:<30}{row.shape:<34}{row.dtype:<10}{times}{row.ratio:>7.2f} {row.note}")
    if path is not None:
        lines = [asdict(row) | {"ratio": row.ratio} for row in rows]
        path.write_text(json.dumps({**about, "read_bytes_per_s": bandwidth, "rows": lines}, indent=1) + "\n")


def bench_main(about: str | None, compare: Callable[[float], Sequence[Row]], sweep: Callable[[float], None]) -> None:
    """The command line of a bench: its table, or with ``--sweep`` other tiles; both get the measured read bandwidth."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--sweep", action="store_true", help="try other tiles instead of printing the table")
    parser.add_argument("--json", type=Path, default=None, help="write the table there too")
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    if args.sweep:
        sweep(bandwidth)
    else:
        report(compare(bandwidth), bandwidth, args.json)
