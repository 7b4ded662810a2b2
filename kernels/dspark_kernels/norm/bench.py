"""``python -m dspark_kernels.norm.bench [--json PATH]``: one kernel beside torch's sum and norm. Needs a GPU.

The inputs of a decode step lie in L2 and the work is short: both ways are bound by launches, and the floor is only a mark.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dspark_kernels.norm import add_rms_norm, reference
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report

CASES = ((6, 2048), (48, 2048), (192, 2048), (768, 2048), (6, 5120))


def compare(bandwidth: float) -> list[Row]:
    table = []
    for rows, width in CASES:
        weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
        sets = [
            tuple(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(16)
        ]
        for way, op in (("fused", add_rms_norm), ("torch: add, rms_norm", reference.add_rms_norm)):
            p20, p50, p80 = graph_us(lambda x, residual, op=op, w=weight: op(x, residual, w, 1e-6), sets)
            table.append(
                Row(
                    op="add_rms_norm", way=way, shape=f"T {rows} H {width}", dtype="bfloat16",
                    p20_us=p20, p50_us=p50, p80_us=p80, floor_us=4 * rows * width * 2 / bandwidth * 1e6,
                )
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    report(compare(bandwidth), bandwidth, args.json)


if __name__ == "__main__":
    main()
