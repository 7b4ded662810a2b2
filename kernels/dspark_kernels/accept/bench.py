"""``python -m dspark_kernels.accept.bench [--json PATH]``: argmax of rows and acceptance beside torch. Needs a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark_kernels.accept import argmax_rows, greedy_accept, greedy_accept_logits, reference
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report

GAMMA = 5
CASES = ((151_936, 1), (151_936, 8), (151_936, 32), (151_936, 128), (32_000, 1), (32_000, 32))
"""Vocabulary, requests."""


def compare(bandwidth: float) -> list[Row]:
    table = []
    for vocab, batch in CASES:
        rows = batch * (GAMMA + 1)
        num_sets = max(2, min(32, (1 << 28) // (rows * vocab * 2)))
        sets: list[tuple[Any, ...]] = []
        for _ in range(num_sets):
            logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
            target = logits.argmax(dim=-1).view(batch, GAMMA + 1)
            draft = target[:, :GAMMA] + (torch.rand(batch, GAMMA, device="cuda") < 0.2).long()
            sets.append((draft, logits, target, torch.full((batch,), GAMMA, device="cuda")))
        ways: tuple[tuple[str, str, Callable[..., Any], bool], ...] = (
            ("argmax_rows", "two stages", lambda d, x, t, p: argmax_rows(x), True),
            ("argmax_rows", "torch.argmax", lambda d, x, t, p: x.argmax(dim=-1), True),
            ("argmax_rows", "torch.max", lambda d, x, t, p: x.max(dim=-1), True),
            ("accept_logits", "fused", lambda d, x, t, p: greedy_accept_logits(d, x, p), True),
            ("accept_logits", "torch chain", lambda d, x, t, p: reference.greedy_accept_logits(d, x, p), True),
            ("accept_tokens", "fused", lambda d, x, t, p: greedy_accept(d, t, p), False),
            ("accept_tokens", "torch chain", lambda d, x, t, p: reference.greedy_accept(d, t, p), False),
        )
        for op, way, fn, reads_logits in ways:
            if not reads_logits and vocab < 100_000:
                continue  # the same work as above
            p20, p50, p80 = graph_us(fn, sets)
            num_bytes = rows * vocab * 2 if reads_logits else 0
            shape = f"B {batch} W {GAMMA + 1}" + (f" V {vocab}" if reads_logits else "")
            table.append(
                Row(
                    op=op, way=way, shape=shape, dtype="bfloat16" if reads_logits else "int64",
                    p20_us=p20, p50_us=p50, p80_us=p80, floor_us=num_bytes / bandwidth * 1e6,
                )
            )  # fmt: skip
        del sets
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    report(compare(bandwidth), bandwidth, args.json)


if __name__ == "__main__":
    main()
