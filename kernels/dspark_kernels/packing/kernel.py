"""Packing as one kernel each way: a program a row. The map to physical experts, the mask and the order by rank are inside."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait
from dspark_kernels.packing.reference import RowLayout, Sent

MAX_ROWS = 1024
"""Rows whose order one program of `pack_by_rank` looks through."""


@triton.jit
def _physical(ids, row, table_ptr, copies_ptr, inside, NUM_EXPERTS: tl.constexpr):
    """Physical ids of logical ``ids`` of ``row``; −1 stays."""
    there = tl.maximum(ids, 0)
    if copies_ptr is not None:
        turn = row % tl.load(copies_ptr + there, mask=inside, other=1)
        there = turn * NUM_EXPERTS + there
    return tl.where(ids >= 0, tl.load(table_ptr + there, mask=inside, other=0), -1)


@triton.jit
def _pack_row(
    source,
    target,
    real,
    x_ptr,
    ids_ptr,
    weights_ptr,
    table_ptr,
    copies_ptr,
    out_x_ptr,  # the three parts of a row, one buffer seen in three dtypes
    out_ids_ptr,
    out_weights_ptr,
    x_stride,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROW_X: tl.constexpr,
    ROW_4: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
):
    """Row ``source`` to place ``target``; zeros of nobody where it is not ``real``."""
    k = tl.arange(0, BLOCK_K)
    inside = (k < K) & real
    ids = tl.load(ids_ptr + source * K + k, mask=inside, other=-1)
    ids = _physical(ids, source, table_ptr, copies_ptr, inside, NUM_EXPERTS)
    weights = tl.load(weights_ptr + source * K + k, mask=inside, other=0.0).to(tl.float32)
    h = tl.arange(0, BLOCK_H)
    x = tl.load(x_ptr + source * x_stride + h, mask=(h < H) & real, other=0.0)
    tl.store(out_x_ptr + target * ROW_X + h, x, mask=h < H)
    tl.store(out_ids_ptr + target * ROW_4 + IDS_AT + k, ids.to(tl.int32), mask=k < K)
    tl.store(out_weights_ptr + target * ROW_4 + WEIGHTS_AT + k, weights, mask=k < K)


@triton.jit
def _pack_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    count_ptr,
    table_ptr,
    copies_ptr,
    out_x_ptr,
    out_ids_ptr,
    out_weights_ptr,
    x_stride,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROW_X: tl.constexpr,
    ROW_4: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    real = row >= 0
    if count_ptr is not None:
        real = row < tl.load(count_ptr)
    _pack_row(
        row, row, real, x_ptr, ids_ptr, weights_ptr, table_ptr, copies_ptr, out_x_ptr, out_ids_ptr, out_weights_ptr, x_stride,
        H, BLOCK_H, K, BLOCK_K, NUM_EXPERTS, ROW_X, ROW_4, IDS_AT, WEIGHTS_AT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _pack_by_rank_kernel(
    x_ptr,
    ids_ptr,
    weights_ptr,
    count_ptr,
    table_ptr,
    copies_ptr,
    out_x_ptr,
    out_ids_ptr,
    out_weights_ptr,
    places_ptr,  # [n, T] int64
    rows_to_ptr,  # [n] int64
    overflow_ptr,  # [1] int64
    x_stride,
    num_rows,
    num_places,
    room,
    num_local,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROW_X: tl.constexpr,
    ROW_4: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    rank, place = tl.program_id(0) // room, tl.program_id(0) % room
    t = tl.arange(0, BLOCK_T)
    real = t < num_rows
    if count_ptr is not None:
        real = real & (t < tl.load(count_ptr))
    wanted = tl.zeros([BLOCK_T], tl.int32)
    for j in tl.static_range(K):
        ids = tl.load(ids_ptr + t * K + j, mask=real, other=-1)
        ids = _physical(ids, t, table_ptr, copies_ptr, real, NUM_EXPERTS)
        wanted = wanted | ((ids >= 0) & (ids // num_local == rank)).to(tl.int32)
    within = tl.cumsum(wanted, 0) - 1
    source = tl.max(tl.where((wanted > 0) & (within == place), t, -1), axis=0)
    _pack_row(
        tl.maximum(source, 0).to(tl.int64), tl.program_id(0).to(tl.int64), source >= 0,
        x_ptr, ids_ptr, weights_ptr, table_ptr, copies_ptr, out_x_ptr, out_ids_ptr, out_weights_ptr, x_stride,
        H, BLOCK_H, K, BLOCK_K, NUM_EXPERTS, ROW_X, ROW_4, IDS_AT, WEIGHTS_AT,
    )  # fmt: skip
    if place == 0:
        at = tl.where((wanted > 0) & (within < room), rank * room + within, num_places)
        tl.store(places_ptr + rank * num_rows + t, at.to(tl.int64), mask=t < num_rows)
        total = tl.sum(wanted, axis=0)
        tl.store(rows_to_ptr + rank, total.to(tl.int64))
        tl.atomic_add(overflow_ptr, tl.maximum(total - room, 0).to(tl.int64))


@triton.jit
def _unpack_kernel(
    rows_x_ptr,
    rows_ids_ptr,
    rows_weights_ptr,
    x_ptr,
    ids_ptr,
    weights_ptr,
    first,
    num_local,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_X: tl.constexpr,
    ROW_4: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    ids = tl.load(rows_ids_ptr + row * ROW_4 + IDS_AT + k, mask=k < K, other=-1)
    weights = tl.load(rows_weights_ptr + row * ROW_4 + WEIGHTS_AT + k, mask=k < K, other=0.0)
    h = tl.arange(0, BLOCK_H)
    x = tl.load(rows_x_ptr + row * ROW_X + h, mask=h < H, other=0.0)
    local = ids - first
    local = tl.where((local >= 0) & (local < num_local), local, -1)
    tl.store(ids_ptr + row * K + k, local.to(tl.int64), mask=k < K)
    tl.store(weights_ptr + row * K + k, weights, mask=k < K)
    tl.store(x_ptr + row * H + h, x, mask=h < H)


@triton.jit(do_not_specialize=["num_rows", "num_places"])
def _sum_kernel(
    back_ptr,  # [P, H]
    places_ptr,  # [n, T]
    out_ptr,  # [T, H]
    num_rows,
    num_places,
    NUM_RANKS: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    row = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * COLS + tl.arange(0, COLS)
    acc = tl.zeros([COLS], tl.float32)
    for r in tl.static_range(NUM_RANKS):
        place = tl.load(places_ptr + r * num_rows + row)
        acc += tl.load(back_ptr + place * H + h, mask=(h < H) & (place < num_places), other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + h, acc.to(out_ptr.dtype.element_ty), mask=h < H)


def pack(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layout: RowLayout,
    table: Tensor,
    num_copies: Tensor | None,
    count: Tensor | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.pack`; the bytes between the parts are left as they are."""
    rows = torch.empty(x.shape[0], layout.row_bytes, dtype=torch.uint8, device=x.device) if out is None else out
    _pack_kernel[(x.shape[0],)](
        x, topk_ids, topk_weights, count, table, num_copies, *_parts(rows, layout), x.stride(0),
        NUM_EXPERTS=table.shape[1], **_shape(layout), num_warps=_warps(layout), **options(chains(x.device)),
    )  # fmt: skip
    return rows


def unpack(rows: Tensor, layout: RowLayout, first: int, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.unpack`."""
    num_rows, device = rows.shape[0], rows.device
    x = torch.empty(num_rows, layout.hidden_size, dtype=layout.dtype, device=device)
    ids = torch.empty(num_rows, layout.topk, dtype=torch.int64, device=device)
    weights = torch.empty(num_rows, layout.topk, dtype=torch.float32, device=device)
    _unpack_kernel[(num_rows,)](
        *_parts(rows, layout), x, ids, weights, first, num_local,
        **_shape(layout), num_warps=_warps(layout), **options(chains(device)),
    )  # fmt: skip
    return x, ids, weights


def pack_by_rank(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layout: RowLayout,
    table: Tensor,
    num_copies: Tensor | None,
    count: Tensor | None,
    *,
    num_ranks: int,
    num_local: int,
    room: int,
    overflow: Tensor,
) -> Sent:
    """As `reference.pack_by_rank`; a program a place, each of which looks its row up among all."""
    num_rows, device = x.shape[0], x.device
    rows = torch.empty(num_ranks * room, layout.row_bytes, dtype=torch.uint8, device=device)
    places = torch.empty(num_ranks, num_rows, dtype=torch.int64, device=device)
    rows_to = torch.empty(num_ranks, dtype=torch.int64, device=device)
    _pack_by_rank_kernel[(num_ranks * room,)](
        x, topk_ids, topk_weights, count, table, num_copies, *_parts(rows, layout), places, rows_to, overflow,
        x.stride(0), num_rows, num_ranks * room, room, num_local,
        NUM_EXPERTS=table.shape[1], BLOCK_T=triton.next_power_of_2(num_rows), **_shape(layout),
        num_warps=_warps(layout), **options(chains(device)),
    )  # fmt: skip
    return Sent(rows, places, rows_to)


def sum_places(back: Tensor, places: Tensor) -> Tensor:
    """As `reference.sum_places`."""
    (num_places, width), (num_ranks, num_rows) = back.shape, places.shape
    out = torch.empty(num_rows, width, dtype=back.dtype, device=back.device)
    cols = min(512, triton.next_power_of_2(width))
    _sum_kernel[(-(-width // cols), num_rows)](
        back, places, out, num_rows, num_places,
        NUM_RANKS=num_ranks, H=width, COLS=cols, num_warps=2, **options(chains(back.device)),
    )  # fmt: skip
    return out


def _parts(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor, Tensor]:
    return rows.view(layout.dtype), rows.view(torch.int32), rows.view(torch.float32)


def _shape(layout: RowLayout) -> dict[str, Any]:
    return {
        "H": layout.hidden_size, "BLOCK_H": triton.next_power_of_2(layout.hidden_size),
        "K": layout.topk, "BLOCK_K": triton.next_power_of_2(layout.topk),
        "ROW_X": layout.row_bytes // layout.dtype.itemsize, "ROW_4": layout.row_bytes // 4,
        "IDS_AT": layout.ids_at // 4, "WEIGHTS_AT": layout.weights_at // 4,
    }  # fmt: skip


def _warps(layout: RowLayout) -> int:
    return 4 if layout.hidden_size >= 1024 else 1
