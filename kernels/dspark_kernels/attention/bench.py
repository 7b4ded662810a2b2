"""``python -m dspark_kernels.attention.bench [--json PATH]``: slots read in place beside a gather and torch's attention.

Needs a GPU. Sets of slots of one large cache take turns, so that K and V come from memory. The floor is the K and V that
the rows may see, once each. The capacity is larger than what is in use where the shape says so: that is what a captured graph
meets, and the gather copies no more than the bound it was captured with.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.attention import decode_attention
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report

D, Q = 128, 6
CASES = (
    (1, 16, 4, 2048, 2048),
    (8, 16, 4, 2048, 2048),
    (32, 16, 4, 2048, 2048),
    (1, 16, 4, 18_432, 18_432),
    (1, 16, 4, 2048, 18_432),
    (8, 16, 4, 16_384, 18_432),
    (1, 32, 4, 2048, 2048),
    (1, 8, 2, 2048, 2048),
)
"""Requests, query heads, K/V heads, positions in use, capacity."""
CACHE_BYTES = 1 << 29


def gathered(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, key_limits: Tensor, *, max_keys: int) -> Tensor:
    """What the plain model does: copies the slots' K and V, masks, and packs the group's query heads as rows."""
    (rows, h, d), h_kv, b = q.shape, k.shape[2], slots.shape[0]
    group, q_rows = h // h_kv, rows // b
    seen = torch.arange(max_keys, device=q.device) < key_limits.view(b, 1, q_rows, 1)
    k, v = (x[:, :max_keys][slots].transpose(1, 2) for x in (k, v))
    q = q.view(b, q_rows, h_kv, group, d).permute(0, 2, 3, 1, 4).reshape(b, h_kv, group * q_rows, d)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.repeat(1, 1, group, 1))
    return y.view(b, h_kv, group, q_rows, d).permute(0, 3, 1, 2, 4).reshape(rows, h * d)


def compare(bandwidth: float) -> list[Row]:
    table = []
    for b, h, h_kv, used, ctx in CASES:
        slot_bytes = 2 * ctx * h_kv * D * 2
        num_sets = max(2, min(32, CACHE_BYTES // (b * slot_bytes)))
        k, v = (torch.randn(num_sets * b, ctx, h_kv, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        # Causal rows at the end of what is in use, requests of somewhat different lengths.
        ends = used - torch.arange(b, device="cuda") * 7 % 64
        limits = (ends[:, None] - Q + 1 + torch.arange(Q, device="cuda")).flatten()
        sets: list[tuple[Any, ...]] = [
            (
                torch.randn(b * Q, h, D, device="cuda", dtype=torch.bfloat16),
                k,
                v,
                torch.arange(i * b, (i + 1) * b, device="cuda"),
                limits,
            )
            for i in range(num_sets)
        ]
        ways: dict[str, Any] = {"split": decode_attention, "gather, SDPA": partial(gathered, max_keys=ctx)}
        if ctx > used:
            ways["gather in use, SDPA"] = partial(gathered, max_keys=used)
        if b == 1 and h == 16:
            ways |= {f"split {n}": partial(decode_attention, num_splits=n) for n in (1, 16, 64)}
        for way, fn in ways.items():
            p20, p50, p80 = graph_us(fn, sets)
            table.append(
                Row(
                    op="attention", way=way, shape=f"B {b} Q {Q} h {h}/{h_kv} n {used} of {ctx}", dtype="bfloat16",
                    p20_us=p20, p50_us=p50, p80_us=p80,
                    floor_us=int(ends.sum()) * h_kv * D * 4 / bandwidth * 1e6,
                )
            )  # fmt: skip
        del k, v, sets
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    report(compare(bandwidth), bandwidth, args.json)


if __name__ == "__main__":
    main()
