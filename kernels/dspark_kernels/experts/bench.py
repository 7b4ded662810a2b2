"""``python -m dspark_kernels.experts.bench [--sweep] [--json PATH]``: the experts beside grouped and batched products.

Needs a GPU. Weights come from memory: two sets of them and eight sets of ids take turns. The floor is the bytes of the
experts that are hit, over measured read bandwidth. ``--sweep`` tries other tiles, one product after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dspark_kernels.experts import experts, kernel
from dspark_kernels.experts.kernel import Product, Tiles, tiles_for
from dspark_kernels.timing import Row, bench_main, graph_us, kernels_us

Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer's shape."""

    num_experts: int
    topk: int
    width: int
    inner: int
    ranks: int = 1
    """Ranks the experts are spread over; rank 0 is timed."""


SMALL = Layer(num_experts=64, topk=6, width=2048, inner=1024)
QWEN3 = Layer(num_experts=128, topk=8, width=2048, inner=768)
CASES = (
    *((SMALL, rows) for rows in (6, 24, 48, 192)),
    *((replace(SMALL, ranks=2), rows) for rows in (6, 48)),
    *((QWEN3, rows) for rows in (6, 48, 192)),
)
SWEPT = ((SMALL, 6), (SMALL, 48), (SMALL, 192), (QWEN3, 6))
NUM_IDS = 8


def grouped(x: Tensor, local_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort, grouped product, activation, grouped product, back into order, weighted sum."""
    (num_rows, topk), num_local = local_ids.shape, gate_up.shape[0]
    by_expert, order = torch.where(local_ids >= 0, local_ids, num_local).flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(num_local, device=x.device), right=True, out_int32=True)
    gate, up = F.grouped_mm(x[order // topk], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows * topk, device=x.device))
    return weighted(y[places].view(num_rows, topk, -1), local_ids, topk_weights)


def dense(x: Tensor, local_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert computes every row in batched products; the wanted ones are picked."""
    gate, up = torch.bmm(x.expand(gate_up.shape[0], *x.shape), gate_up.transpose(1, 2)).chunk(2, dim=-1)
    y = torch.bmm(F.silu(gate) * up, down.transpose(1, 2))
    picked = y[local_ids.clamp(min=0), torch.arange(x.shape[0], device=x.device)[:, None]]
    return weighted(picked, local_ids, topk_weights)


def weighted(y: Tensor, local_ids: Tensor, topk_weights: Tensor) -> Tensor:
    kept = (local_ids >= 0)[..., None]
    return torch.where(kept, y.float() * topk_weights[..., None], 0.0).sum(dim=1).to(y.dtype)


def weights_of(layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """Two sets of gate_up and down."""
    num_local = layer.num_experts // layer.ranks

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_local, *shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    return [(draw(2 * layer.inner, layer.width), draw(layer.width, layer.inner)) for _ in range(2)]


def inputs(layer: Layer, rows: int, weights: list[tuple[Tensor, Tensor]]) -> list[Args]:
    """`NUM_IDS` argument sets with the two sets of weights in turn."""
    num_local, gen = layer.num_experts // layer.ranks, torch.Generator().manual_seed(0)
    sets: list[Args] = []
    for i in range(NUM_IDS):
        ids = torch.rand(rows, layer.num_experts, generator=gen).argsort(dim=-1)[:, : layer.topk]
        ids = torch.where(ids < num_local, ids, -1).cuda()
        x = torch.randn(rows, layer.width, device="cuda", dtype=torch.bfloat16)
        sets.append((x, ids, torch.rand(rows, layer.topk, device="cuda"), *weights[i % 2]))
    return sets


def floor_bytes(sets: list[Args]) -> tuple[float, float]:
    """Mean experts hit, and mean bytes that must move: those experts' weights, rows in, rows out."""
    hit = sum(len(set(ids.flatten().tolist()) - {-1}) for _, ids, *_ in sets) / len(sets)
    x, _, _, gate_up, down = sets[0]
    return hit, hit * (gate_up[0].nbytes + down[0].nbytes) + 2 * x.nbytes


def parts(fn: Callable[..., Any], sets: list[Args]) -> str:
    """Microseconds of each of our kernels, in one line."""
    short = {"_list_kernel": "list", "_experts_kernel": "products", "_combine_kernel": "combine"}
    took = kernels_us(fn, list(sets))
    return ", ".join(f"{word} {took[name]:.1f}" for name, word in short.items() if name in took)


def with_tiles(tiles: Tiles) -> Callable[..., Tensor]:
    return lambda *args: experts(*args, tiles=tiles)


def name_of(layer: Layer, rows: int) -> str:
    spread = f" of {layer.num_experts}" if layer.ranks > 1 else ""
    return f"T {rows} E {layer.num_experts // layer.ranks}{spread} k {layer.topk} I {layer.inner}"


def compare(bandwidth: float) -> list[Row]:
    """The table: every way on every shape."""
    table, made = [], None
    weights: list[tuple[Tensor, Tensor]] = []
    for layer, rows in CASES:
        if layer != made:
            weights.clear()
            weights.extend(weights_of(layer))
            made = layer
        sets = inputs(layer, rows, weights)
        hit, num_bytes = floor_bytes(sets)
        tiles = tiles_for(rows * layer.topk, layer.num_experts // layer.ranks, torch.bfloat16)
        ways: dict[str, Callable[..., Tensor]] = {
            "fused": with_tiles(replace(tiles, chained=False)),
            "fused, chained": with_tiles(replace(tiles, chained=True)),
            "grouped_mm": grouped,
            "dense bmm": dense,
        }
        for way, fn in ways.items():
            p20, p50, p80 = graph_us(fn, sets)
            note = f"{hit:.0f} experts hit" + (f": {parts(fn, sets)}" if way == "fused" else "")
            table.append(
                Row(
                    op="experts", way=way, shape=name_of(layer, rows), dtype="bfloat16",
                    p20_us=p20, p50_us=p50, p80_us=p80, floor_us=num_bytes / bandwidth * 1e6, note=note,
                )
            )  # fmt: skip
        del sets
    return table


def candidates(rows: int) -> Iterator[Product]:
    """Tiles worth a try; wide ones only where an expert has many rows."""
    for cols in (16, 32, 64) if rows == 16 else (32, 64, 128):
        for depth, stages in ((64, 4), (64, 6), (128, 3), (128, 4), (128, 5), (256, 3)):
            if cols * depth <= 8192:
                yield Product(cols=cols, depth=depth, stages=stages)


def sweep(bandwidth: float) -> None:
    """Per shape: the best tiles of gate_up with the table's down, then of down; then chaining and the lists."""
    for layer, rows in SWEPT:
        sets = inputs(layer, rows, weights_of(layer))
        floor = floor_bytes(sets)[1] / bandwidth * 1e6
        best = tiles_for(rows * layer.topk, layer.num_experts, torch.bfloat16)
        for product in ("up", "down"):
            tried: list[tuple[float, Tiles]] = []
            for cut in (getattr(best, product), *candidates(best.rows)):
                tiles = replace(best, **{product: cut})
                try:
                    tried.append((graph_us(with_tiles(tiles), sets, replays=10)[1], tiles))
                except OutOfResources:
                    continue
            first, tried = tried[0], sorted(tried, key=lambda pair: pair[0])
            best = tried[0][1]
            print(f"{name_of(layer, rows)} {product}: table {first[0]:.1f} µs, floor {floor:.1f}; then")
            for us, tiles in tried[:5]:
                print(f"    {us:7.1f}  {getattr(tiles, product)}")
        for chained in (False, True):
            for search in (0, 512):
                kernel.SEARCH_PAIRS = search
                us = graph_us(with_tiles(replace(best, chained=chained)), sets, replays=10)[1]
                print(f"    {us:7.1f}  chained {chained}, {'lists' if rows * layer.topk > search else 'search'}")
        kernel.SEARCH_PAIRS = 256
        print(f"    parts: {parts(with_tiles(best), sets)}", flush=True)
        del sets


if __name__ == "__main__":
    bench_main(__doc__, compare, sweep)
