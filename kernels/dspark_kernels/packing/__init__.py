"""Packing: rows that travel to their experts' ranks, with their experts and weights, as rows of bytes; and their outputs' sum."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.packing import reference
from dspark_kernels.packing.reference import NOBODY, RowLayout, Sent, physical_ids

__all__ = ["NOBODY", "RowLayout", "Sent", "pack", "pack_by_rank", "physical_ids", "sum_places", "unpack"]


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
    """Rows, physical ids and weights as [T, row_bytes] uint8 (into ``out`` where given); see `reference.pack`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, topk_ids, topk_weights, layout, table, num_copies, count)
    if out is not None and (tuple(out.shape) != (x.shape[0], layout.row_bytes) or out.dtype != torch.uint8):
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} must be [{x.shape[0]}, {layout.row_bytes}] uint8.")
    x, topk_ids, topk_weights = _rows(x, topk_ids, topk_weights)
    return _backend(x).pack(x, topk_ids, topk_weights, layout, table, num_copies, count, out=out)


def unpack(rows: Tensor, layout: RowLayout, first: int, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, H], local ids [R, k] and weights [R, k] of ``rows`` [R, row_bytes]; see `reference.unpack`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if rows.dim() != 2 or rows.shape[1] != layout.row_bytes or rows.dtype != torch.uint8:
        raise ValueError(f"rows {tuple(rows.shape)} {rows.dtype} must be [R, {layout.row_bytes}] uint8.")
    return _backend(rows).unpack(rows.contiguous(), layout, first, num_local)


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
    """Each row once to every rank that has one of its experts, ``room`` places a rank; see `reference.pack_by_rank`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, topk_ids, topk_weights, layout, table, num_copies, count)
    if overflow.shape != (1,) or overflow.dtype != torch.int64 or room < 1:
        raise ValueError(f"overflow must be one int64 and room={room} at least 1.")
    x, topk_ids, topk_weights = _rows(x, topk_ids, topk_weights)
    backend = _backend(x, most=True)
    return backend.pack_by_rank(
        x, topk_ids, topk_weights, layout, table, num_copies, count,
        num_ranks=num_ranks, num_local=num_local, room=room, overflow=overflow,
    )  # fmt: skip


def sum_places(back: Tensor, places: Tensor) -> Tensor:
    """[T, H]: the sum over ranks of ``back`` [P, H] at ``places`` [n, T] (P: none); see `reference.sum_places`."""
    return _backend(back).sum_places(back.contiguous(), places)


def _rows(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x if x.stride(-1) == 1 else x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layout: RowLayout,
    table: Tensor,
    num_copies: Tensor | None,
    count: Tensor | None,
) -> None:
    rows = x.shape[0]
    if tuple(x.shape) != (rows, layout.hidden_size) or x.dtype != layout.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} must be [T, {layout.hidden_size}] {layout.dtype}.")
    if tuple(ids.shape) != (rows, layout.topk) or ids.shape != weights.shape:
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} must be {(rows, layout.topk)}.")
    if table.dim() != 2 or (num_copies is None and table.shape[0] != 1):
        raise ValueError(f"table {tuple(table.shape)} must be [C, E], and C > 1 needs num_copies [E].")
    if num_copies is not None and tuple(num_copies.shape) != (table.shape[1],):
        raise ValueError(f"num_copies {tuple(num_copies.shape)} must be ({table.shape[1]},).")
    if count is not None and count.numel() != 1:
        raise ValueError(f"count must hold one element, not {count.numel()}.")


def _backend(rows: Tensor, *, most: bool = False) -> ModuleType:
    """``most``: Triton up to its number of rows only."""
    if not on_triton(rows):
        return reference
    from dspark_kernels.packing import kernel

    return reference if most and rows.shape[0] > kernel.MAX_ROWS else kernel
