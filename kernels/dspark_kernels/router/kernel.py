"""Router kernels: one warp a row for softmax, top-k, map and mask; before it, optionally, the gate in slices of H, and before
that the residual sum and RMS norm, whose scale is put to the logits when their slices are added up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait
from dspark_kernels.linear.kernel import add_slices
from dspark_kernels.linear.reference import Slices
from dspark_kernels.router.reference import NormedRoute

__all__ = ["gate_and_route", "norm_gate_route", "route"]

SLICE = 64
"""Columns of H one program of the gate multiplies; the row kernel adds the slices up in a fixed order."""


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(
    logits_ptr,  # [S, T, E] float; S slices to be added up
    count_ptr,  # [1] int32 or None
    physical_ptr,  # [C, E] int64 or None
    copies_ptr,  # [E] int64 or None: C is 1
    ids_ptr,  # [T, k] int64
    weights_ptr,  # [T, k] float32
    squares_ptr,  # [S, T] float32 or None: sums of squares of rows whose scale the logits still lack
    total_ptr,  # [T, H]: those rows
    norm_ptr,  # [H]
    normed_ptr,  # [T, H]
    num_rows,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHAINED: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if squares_ptr is not None:
        part = tl.arange(0, BLOCK_S)
        squares = tl.load(squares_ptr + part * num_rows + row, mask=part < NUM_SLICES, other=0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=0) / H + eps)
        if tl.program_id(1) == 1:
            h = tl.arange(0, BLOCK_H)
            total = tl.load(total_ptr + row * H + h, mask=h < H, other=0.0)
            norm = tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            tl.store(normed_ptr + row * H + h, (total.to(tl.float32) * scale * norm).to(total.dtype), mask=h < H)
    if tl.program_id(1) == 0:
        _choose(
            logits_ptr, count_ptr, physical_ptr, copies_ptr, ids_ptr, weights_ptr, row, scale, num_rows,
            NUM_SLICES, BLOCK_S, NUM_EXPERTS, BLOCK_E, K, BLOCK_K, RENORMALIZE,
        )  # fmt: skip


@triton.jit
def _choose(
    logits_ptr,
    count_ptr,
    physical_ptr,
    copies_ptr,
    ids_ptr,
    weights_ptr,
    row,
    scale,
    num_rows,
    NUM_SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One row's softmax, top-k, map and mask. The count is on its way while the logits are added up."""
    num_real = num_rows
    if count_ptr is not None:
        num_real = tl.load(count_ptr)
    lane = tl.arange(0, BLOCK_E)
    real_lane = lane < NUM_EXPERTS
    if NUM_SLICES == 1:
        logits = tl.load(logits_ptr + row * NUM_EXPERTS + lane, mask=real_lane, other=0.0).to(tl.float32)
    else:
        piece = tl.arange(0, BLOCK_S)[:, None]
        at = logits_ptr + (piece * num_rows + row) * NUM_EXPERTS + lane[None, :]
        logits = tl.sum(tl.load(at, mask=(piece < NUM_SLICES) & real_lane[None, :], other=0.0), axis=0)
    logits = tl.where(real_lane, logits * scale, float("-inf"))
    # A NaN is left out of the maximum (what hardware and interpreter make of it differs) and spoils its row in the sum.
    exps = tl.exp(logits - tl.max(tl.where(logits == logits, logits, -3.0e38), axis=0))
    probs = exps / tl.sum(exps, axis=0)
    # NaN rows (padding) still choose k different experts within the table; −2 is "taken", −3 "no expert".
    left = tl.where(real_lane, tl.where(probs == probs, probs, -1.0), -3.0)
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for j in tl.static_range(K):
        best = tl.argmax(left, axis=0, tie_break_left=True)
        weight = tl.sum(tl.where(lane == best, probs, 0.0), axis=0)
        left = tl.where(lane == best, -2.0, left)
        ids = tl.where(slot == j, best, ids)
        weights = tl.where(slot == j, weight, weights)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    if physical_ptr is not None:
        if copies_ptr is not None:
            ids += (row % tl.load(copies_ptr + ids, mask=slot < K, other=1)).to(tl.int32) * NUM_EXPERTS
        ids = tl.load(physical_ptr + ids, mask=slot < K, other=0)
    if count_ptr is not None:
        real = row < num_real
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    tl.store(ids_ptr + row * K + slot, ids.to(tl.int64), mask=slot < K)
    tl.store(weights_ptr + row * K + slot, weights, mask=slot < K)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _gate_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H] or None
    norm_ptr,  # [H] or None
    gate_ptr,  # [E, H]
    partial_ptr,  # [S, T, E] float32
    squares_ptr,  # [S, T] float32 or None
    total_ptr,  # [T, H] or None
    num_rows,
    num_experts,
    x_stride,
    residual_stride,
    NUM_X_SLICES: tl.constexpr,  # 0: x is [T, H]; else [S', T, H] float32 to be added up
    CHAINED: tl.constexpr,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    piece = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = piece * BLOCK_H + tl.arange(0, BLOCK_H)
    row_ok, expert_ok, h_ok = row < num_rows, expert < num_experts, h < H
    inside = row_ok[:, None] & h_ok[None, :]
    w = tl.load(gate_ptr + expert[:, None] * H + h[None, :], mask=expert_ok[:, None] & h_ok[None, :], other=0.0)
    wait(CHAINED)
    if NUM_X_SLICES > 0:
        x = add_slices(x_ptr, row[:, None] * H + h[None, :], inside, num_rows * H, NUM_X_SLICES).to(w.dtype)
    else:
        x = tl.load(x_ptr + row[:, None] * x_stride + h[None, :], mask=inside, other=0.0)
    first = tl.program_id(0) == 0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + h[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row[:, None] * H + h[None, :], x, mask=inside & first)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        tl.store(squares_ptr + piece * num_rows + row, tl.sum(wide * wide, axis=1), mask=row_ok & first)
        x = (wide * tl.load(norm_ptr + h, mask=h_ok, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
    y = tl.dot(w, tl.trans(x), input_precision="ieee")  # [E, T]: the gate is the tall operand
    at = partial_ptr + (piece * num_rows + row[None, :]) * num_experts + expert[:, None]
    tl.store(at, y, mask=row_ok[None, :] & expert_ok[:, None])


def route(
    logits: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.route`; one kernel."""
    return _rows(logits.contiguous()[None], k, renormalize, count, physical, num_copies)


def gate_and_route(
    x: Tensor,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.gate_and_route`; two kernels, the logits in slices of H between them."""
    partial, _, _ = _gate(x, None, None, gate)
    return _rows(partial, k, renormalize, count, physical, num_copies)


def norm_gate_route(
    x: Tensor | Slices,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> NormedRoute:
    """As `reference.norm_gate_route`; two kernels, logits and squares in slices of H between them."""
    partial, squares, total = _gate(x, residual, norm_weight, gate)
    assert squares is not None
    normed = torch.empty_like(total)
    ids, weights = _rows(
        partial, k, renormalize, count, physical, num_copies, Norm(squares, total, norm_weight, normed, eps)
    )
    return NormedRoute(normed, total, ids, weights)


class Norm(NamedTuple):
    """What the row kernel needs to finish the norm that the gate began."""

    squares: Tensor
    total: Tensor
    weight: Tensor
    normed: Tensor
    eps: float


def _gate(
    x: Tensor | Slices, residual: Tensor | None, norm_weight: Tensor | None, gate: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits [S, T, E] in slices; with a norm also squares [S, T]; and the sum [T, H]."""
    source = x.parts if isinstance(x, Slices) else x if x.stride(1) == 1 else x.contiguous()
    (num_rows, width), num_experts, device = source.shape[-2:], gate.shape[0], source.device
    num_slices = -(-width // SLICE)
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    partial = torch.empty(num_slices, num_rows, num_experts, dtype=torch.float32, device=device)
    squares = None if norm_weight is None else torch.empty(num_slices, num_rows, dtype=torch.float32, device=device)
    assert residual is not None or isinstance(x, Tensor), "slices come with a residual"
    new_total = residual is not None
    total = torch.empty(num_rows, width, dtype=gate.dtype, device=device) if new_total else source.contiguous()
    block_e = min(64, max(16, triton.next_power_of_2(num_experts)))
    cut: dict[str, Any] = {"H": width, "BLOCK_T": 16, "BLOCK_E": block_e, "BLOCK_H": SLICE,
                           "NUM_X_SLICES": source.shape[0] if isinstance(x, Slices) else 0}  # fmt: skip
    _gate_kernel[(-(-num_experts // block_e), -(-num_rows // 16), num_slices)](
        source, residual, norm_weight, gate.contiguous(), partial, squares, total if new_total else None,
        num_rows, num_experts, source.stride(-2), residual.stride(0) if residual is not None else 0,
        **cut, **options(chains(device)),
    )  # fmt: skip
    return partial, squares, total


def _rows(
    logits: Tensor,
    k: int,
    renormalize: bool,
    count: Tensor | None,
    physical: Tensor | None,
    num_copies: Tensor | None,
    norm: Norm | None = None,
) -> tuple[Tensor, Tensor]:
    """``logits`` [S, T, E], S slices to be added up, to ids and weights [T, k]; ``norm`` is finished in programs of its own."""
    num_slices, num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    block_s, block_e = triton.next_power_of_2(num_slices), triton.next_power_of_2(num_experts)
    width = 1 if norm is None else norm.total.shape[1]
    constants: dict[str, Any] = {
        "NUM_SLICES": num_slices, "BLOCK_S": block_s, "NUM_EXPERTS": num_experts, "BLOCK_E": block_e,
        "K": k, "BLOCK_K": triton.next_power_of_2(k), "RENORMALIZE": renormalize,
        "H": width, "BLOCK_H": triton.next_power_of_2(width),
        # One warp needs no barriers; more only where its registers would not hold the slices.
        "num_warps": 1 if block_s * block_e <= 2048 else 4,
    }  # fmt: skip
    squares, total, weight, normed, eps = norm or (None, None, None, None, 0.0)
    _route_kernel[(num_rows, 1 if norm is None else 2)](
        logits, count, physical, num_copies, ids, weights, squares, total, weight, normed, num_rows, eps,
        **constants, **options(chains(logits.device)),
    )  # fmt: skip
    return ids, weights
