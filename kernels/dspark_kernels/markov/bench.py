"""``python -m dspark_kernels.markov.bench [--sweep] [--json PATH]``: the walk beside torch's chain. Needs a GPU.

The floor is γ · V · r · bytes of W2; the note gives the ratio to all bytes, base logits (and noise) included, which no walk
can leave out at large batches. W2 is smaller than L2 at V 32,000, and part of it stays there at 151,936: steps that turn
round read that part again, so a ratio may be under 1. ``--sweep`` tries other tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from dspark_kernels.markov import kernel, markov_walk, reference
from dspark_kernels.timing import Row, bench_main, graph_us, kernels_us

GAMMA, RANK = 5, 256
CASES = ((151_936, 1), (151_936, 8), (151_936, 32), (151_936, 128), (32_000, 1), (32_000, 32))


def inputs(vocab: int, batch: int) -> list[tuple[Any, ...]]:
    """Two sets of base logits, anchors, W1 and W2."""
    return [
        (
            torch.randn(batch, GAMMA, vocab, device="cuda", dtype=torch.bfloat16),
            torch.randint(0, vocab, (batch,), device="cuda"),
            *(torch.randn(vocab, RANK, device="cuda", dtype=torch.bfloat16) / 4 for _ in range(2)),
        )
        for _ in range(2)
    ]


def floors(sets: list[tuple[Any, ...]], bandwidth: float) -> tuple[float, float]:
    """Microseconds of γ times W2, and of that with the base logits."""
    base, _, _, w2 = sets[0][:4]
    return GAMMA * w2.nbytes / bandwidth * 1e6, (GAMMA * w2.nbytes + base.nbytes) / bandwidth * 1e6


def compare(bandwidth: float) -> list[Row]:
    table = []

    def add(
        way: str, fn: Callable[..., Any], vocab: int, batch: int, sets: list[tuple[Any, ...]], extra: int = 0
    ) -> None:
        p20, p50, p80 = graph_us(fn, sets, replays=20, calls=4)
        floor, whole = floors(sets, bandwidth)
        whole += extra / bandwidth * 1e6
        table.append(
            Row(
                op="markov_walk", way=way, shape=f"B {batch} γ {GAMMA} V {vocab} r {RANK}", dtype="bfloat16",
                p20_us=p20, p50_us=p50, p80_us=p80, floor_us=floor, note=f"{p50 / whole:.2f} of all bytes",
            )
        )  # fmt: skip

    for vocab, batch in CASES:
        sets = inputs(vocab, batch)
        fused = batch <= kernel.FUSED_BATCH
        add("fused", markov_walk, vocab, batch, sets)
        add("torch: linear, add, argmax", reference.markov_walk, vocab, batch, sets)
        if batch in (1, 8, 32):
            other = "a kernel between steps" if fused else "reduced in the next step"
            add(other, partial(kernel.markov_walk, fused=not fused), vocab, batch, sets)
        if vocab > 100_000 and batch in (1, 128):
            add("always forward", partial(kernel.markov_walk, turning=False), vocab, batch, sets)
            add("with corrected", partial(markov_walk, with_corrected=True), vocab, batch, sets, sets[0][0].nbytes)
            noise = torch.rand(batch, GAMMA, vocab, device="cuda")
            add("with noise", partial(markov_walk, noise=noise), vocab, batch, sets, noise.nbytes)
            del noise
        del sets
    return table


def sweep(bandwidth: float) -> None:
    """Tiles at V 151,936: the seven best of each batch, after our choice."""
    for batch in (1, 128):
        sets = inputs(151_936, batch)
        programs = kernel.geometry(batch, 151_936, RANK, torch.bfloat16, sets[0][0].device, False)["PROGRAMS"]
        one = programs // 2 if batch == 1 else programs
        choices = product((32, 64, 128), (2, 3, 4), (one, 2 * one), (4, 8))
        if batch == 128:
            choices = product((32, 64), (2, 3, 4), (one,), (8,))
        tried: list[tuple[float, dict[str, int]]] = []
        for block_v, stages, grid, warps in choices:
            if batch == 1 and warps == 8 and block_v < 128:
                continue
            tiles = {"BLOCK_V": block_v, "STAGES": stages, "PROGRAMS": grid, "num_warps": warps}
            try:
                us = graph_us(partial(kernel.markov_walk, tiles=tiles), sets, replays=10, calls=2)[1]
            except OutOfResources:
                continue
            tried.append((us, tiles))
        ours = graph_us(markov_walk, sets, replays=10, calls=2)[1]
        print(f"B {batch}: ours {ours:.1f} µs, floor {floors(sets, bandwidth)[0]:.1f}; then")
        for us, tiles in sorted(tried, key=lambda pair: pair[0])[:7]:
            print(f"    {us:7.1f}  {tiles}")
        print("    parts:", {name: round(us, 1) for name, us in kernels_us(markov_walk, sets).items()}, flush=True)
        del sets


if __name__ == "__main__":
    bench_main(__doc__, compare, sweep)
