"""``python -m dspark_kernels.fill.bench [--json PATH]``: ways to set one int32 on the device. Needs a GPU.

Two times count: the device's, in a graph, and the host's, in a loop of calls. The slot is filled before each replay, outside
the graph, so the host's time decides.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark_kernels.fill import kernel, reference
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report


def host_us(fn: Callable[[int], Any], *, samples: int = 40, calls: int = 50) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile of the host's microseconds for one call; the device's queue is emptied between samples."""
    took = []
    for sample in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for n in range(calls):
            fn(sample + n)
        took.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    took.sort()
    p20, p50, p80 = (took[int(share * (samples - 1))] for share in (0.2, 0.5, 0.8))
    return p20, p50, p80


def compare() -> list[Row]:
    buffer = torch.zeros(1, dtype=torch.int32, device="cuda")
    pinned = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def staged(n: int) -> None:
        pinned[0] = n  # a loop that runs ahead needs a ring of these
        buffer.copy_(pinned, non_blocking=True)

    ways: dict[str, Callable[[int], Any]] = {
        "fill_": lambda n: reference.fill_scalar(buffer, n),
        "Triton": lambda n: kernel.fill_scalar(buffer, n),
        "pinned copy": staged,
        "new tensor, pageable": lambda n: torch.tensor(n, dtype=torch.int32, device="cuda"),
    }
    table = []
    for way, fn in ways.items():
        fn(3)
        kinds = [("host", host_us(fn))]
        if way in ("fill_", "Triton"):
            kinds.append(("device", graph_us(lambda fn=fn: fn(3), [()], calls=32)))
        for kind, (p20, p50, p80) in kinds:
            table.append(
                Row(
                    op="fill_scalar", way=way, shape=f"(1,), {kind}", dtype="int32",
                    p20_us=p20, p50_us=p50, p80_us=p80, floor_us=0.0,
                )
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    report(compare(), bandwidth, args.json)


if __name__ == "__main__":
    main()
