"""``python -m dspark_kernels.linear.bench [--sweep] [--json PATH]``: products of few rows beside cuBLAS.

Needs a GPU. Weights come from memory: sets of them take turns, several times the L2 in all. The floor is the weight's bytes
over measured read bandwidth. ``--sweep`` tries other tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dspark_kernels.linear import kernel
from dspark_kernels.linear.kernel import Tile
from dspark_kernels.norm import add_rms_norm
from dspark_kernels.timing import Row, bench_main, graph_us

SHAPES = {"small qkv": (3072, 2048), "small o": (2048, 2048), "qwen3 qkv": (5120, 2048), "qwen3 o": (2048, 4096),
          "small fc": (2048, 6144), "small head": (32_000, 2048)}  # fmt: skip
ROWS = (6, 24, 48)
NUM_SETS = 16


def inputs(rows: int, cols: int, depth: int) -> list[tuple[Tensor, ...]]:
    """Sets of x, residual, norm weight and weight."""
    num = max(2, min(NUM_SETS, 400_000_000 // (2 * cols * depth)))
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    return [(draw(rows, depth), draw(rows, depth), draw(depth), draw(cols, depth)) for _ in range(num)]


def ways(tile: Tile | None) -> dict[str, Callable[..., Any]]:
    """With and without the norm. Slices are left for their reader to add up."""

    def norm_then_cublas(x: Tensor, residual: Tensor, norm: Tensor, w: Tensor) -> Tensor:
        return F.linear(add_rms_norm(x, residual, norm, 1e-6)[0], w)

    def sliced_behind_norm(x: Tensor, residual: Tensor, norm: Tensor, w: Tensor) -> Any:
        return kernel.sliced_linear(x, w, residual=residual, norm_weight=norm, eps=1e-6, tile=tile)

    return {
        "product: sliced": lambda x, r, n, w: kernel.sliced_linear(x, w, tile=tile),
        "product: cuBLAS": lambda x, r, n, w: F.linear(x, w),
        "norm, product: sliced": sliced_behind_norm,
        "norm, product: norm, cuBLAS": norm_then_cublas,
    }


def compare(bandwidth: float) -> list[Row]:
    """The table: every way on every shape."""
    table = []
    for name, (cols, depth) in SHAPES.items():
        for rows in ROWS:
            sets = inputs(rows, cols, depth)
            floor = 2 * cols * depth / bandwidth * 1e6
            for way, fn in ways(None).items():
                p20, p50, p80 = graph_us(fn, sets)
                shape = f"{name}: T {rows} N {cols} K {depth}"
                table.append(
                    Row(op="linear", way=way, shape=shape, dtype="bfloat16", p20_us=p20, p50_us=p50, p80_us=p80,
                        floor_us=floor)
                )  # fmt: skip
    return table


def sweep(bandwidth: float) -> None:
    """Per shape the best tiles of the product with its norm."""
    for name, (cols, depth) in SHAPES.items():
        for rows in ROWS[:2]:
            sets, tried = inputs(rows, cols, depth), []
            for width in (32, 64, 128):
                for deep in (64, 128, 256, 512):
                    for warps in (4, 8):
                        tile = Tile(cols=width, depth=deep, warps=warps)
                        try:
                            us = graph_us(ways(tile)["norm, product: sliced"], sets, replays=8)[1]
                        except OutOfResources:
                            continue
                        tried.append((us, tile))
            tried.sort(key=lambda pair: pair[0])
            print(f"{name} T {rows}: floor {2 * cols * depth / bandwidth * 1e6:.1f} µs; best")
            for us, tile in tried[:4]:
                print(f"    {us:6.2f}  {tile}", flush=True)


if __name__ == "__main__":
    bench_main(__doc__, compare, sweep)
