"""``python -m dspark_kernels.qkv.bench [--json PATH]``: one kernel beside the chain of torch operations. Needs a GPU.

As in a decode step the rows lie in L2; the floor (rows read, q, K and V written) is only a mark.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dspark_kernels.qkv import k_norm_rope_write, qk_norm_rope_write, reference
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report

CTX = 2048
CASES = ((1, 6, 16, 4, 128), (8, 6, 16, 4, 128), (32, 6, 16, 4, 128), (1, 6, 32, 4, 128))
"""Requests, rows of each, query heads, K/V heads, head_dim."""


def compare(bandwidth: float) -> list[Row]:
    table = []
    for b, q_rows, h, h_kv, d in CASES:
        rows, columns = b * q_rows, (h + 2 * h_kv) * d
        caches = [torch.zeros(b + 1, CTX, h_kv, d, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        weights = [torch.randn(d, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        inv_freq = 1.0 / 1e6 ** (torch.arange(0, d, 2, device="cuda").float() / d)
        slots = torch.arange(b, device="cuda").repeat_interleave(q_rows)
        sets = [
            (
                torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16),
                (torch.randint(0, CTX - 8, (b, 1), device="cuda") + torch.arange(q_rows, device="cuda")).flatten(),
            )
            for _ in range(16)
        ]

        def whole(qkv, positions, op, weights=weights, inv_freq=inv_freq, slots=slots, caches=caches):
            return op(qkv, *weights, positions, inv_freq, slots, *caches, 1e-6)

        def context(qkv, positions, op, weights=weights, inv_freq=inv_freq, slots=slots, caches=caches, skip=h * d):
            return op(qkv[:, skip:], weights[1], positions, inv_freq, slots, *caches, 1e-6)

        ways = (
            ("qk_norm_rope", "fused", whole, qk_norm_rope_write, columns),
            ("qk_norm_rope", "torch chain", whole, reference.qk_norm_rope_write, columns),
            ("k_norm_rope", "fused", context, k_norm_rope_write, 2 * h_kv * d),
            ("k_norm_rope", "torch chain", context, reference.k_norm_rope_write, 2 * h_kv * d),
        )
        for op, way, run, fn, width in ways:
            p20, p50, p80 = graph_us(lambda x, positions, run=run, fn=fn: run(x, positions, fn), sets)
            table.append(
                Row(
                    op=op, way=way, shape=f"T {rows} h {h}/{h_kv} d {d}", dtype="bfloat16",
                    p20_us=p20, p50_us=p50, p80_us=p80, floor_us=2 * rows * width * 2 / bandwidth * 1e6,
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
