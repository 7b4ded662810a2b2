"""Router kernels: one warp a row for softmax, top-k, map and mask; before it, optionally, the gate in slices of H."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Whether these kernels run in Triton's interpreter, which takes CPU tensors."""

SLICE = 128
"""Columns of H one program of the gate multiplies; the row kernel adds the slices up in a fixed order."""


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(
    logits_ptr,  # [S, T, E] float; S slices to be added up
    count_ptr,  # [1] int32 or None
    physical_ptr,  # [E] int64 or None
    ids_ptr,  # [T, k] int64
    weights_ptr,  # [T, k] float32
    num_rows,
    NUM_SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_E)
    real_lane = lane < NUM_EXPERTS
    if NUM_SLICES == 1:
        logits = tl.load(logits_ptr + row * NUM_EXPERTS + lane, mask=real_lane, other=0.0).to(tl.float32)
    else:
        piece = tl.arange(0, BLOCK_S)[:, None]
        at = logits_ptr + (piece * num_rows + row) * NUM_EXPERTS + lane[None, :]
        logits = tl.sum(tl.load(at, mask=(piece < NUM_SLICES) & real_lane[None, :], other=0.0), axis=0)
    logits = tl.where(real_lane, logits, float("-inf"))
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
        ids = tl.load(physical_ptr + ids, mask=slot < K, other=0)
    if count_ptr is not None:
        real = row < tl.load(count_ptr)
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    tl.store(ids_ptr + row * K + slot, ids.to(tl.int64), mask=slot < K)
    tl.store(weights_ptr + row * K + slot, weights, mask=slot < K)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _gate_kernel(
    x_ptr,  # [T, H]
    gate_ptr,  # [E, H]
    partial_ptr,  # [S, T, E] float32
    num_rows,
    num_experts,
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
    x = tl.load(x_ptr + row[:, None] * H + h[None, :], mask=row_ok[:, None] & h_ok[None, :], other=0.0)
    w = tl.load(gate_ptr + expert[:, None] * H + h[None, :], mask=expert_ok[:, None] & h_ok[None, :], other=0.0)
    y = tl.dot(x, tl.trans(w), input_precision="ieee")
    at = partial_ptr + (piece * num_rows + row[:, None]) * num_experts + expert[None, :]
    tl.store(at, y, mask=row_ok[:, None] & expert_ok[None, :])


def route(
    logits: Tensor, k: int, *, renormalize: bool, count: Tensor | None = None, physical: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.route`; one kernel."""
    return _rows(logits.contiguous()[None], k, renormalize, count, physical)


def gate_and_route(
    x: Tensor,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.gate_and_route`; two kernels, the logits in slices of H between them."""
    (num_rows, width), num_experts = x.shape, gate.shape[0]
    num_slices = -(-width // SLICE)
    partial = torch.empty(num_slices, num_rows, num_experts, dtype=torch.float32, device=x.device)
    block_e = min(32, max(16, triton.next_power_of_2(num_experts)))
    cut: dict[str, Any] = {"H": width, "BLOCK_T": 16, "BLOCK_E": block_e, "BLOCK_H": SLICE}
    _gate_kernel[(-(-num_experts // block_e), -(-num_rows // 16), num_slices)](
        x.contiguous(), gate.contiguous(), partial, num_rows, num_experts, **cut
    )
    return _rows(partial, k, renormalize, count, physical)


def _rows(
    logits: Tensor, k: int, renormalize: bool, count: Tensor | None, physical: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``logits`` [S, T, E], S slices to be added up, to ids and weights [T, k]."""
    num_slices, num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    block_s, block_e = triton.next_power_of_2(num_slices), triton.next_power_of_2(num_experts)
    options: dict[str, Any] = {
        "NUM_SLICES": num_slices, "BLOCK_S": block_s, "NUM_EXPERTS": num_experts, "BLOCK_E": block_e,
        "K": k, "BLOCK_K": triton.next_power_of_2(k), "RENORMALIZE": renormalize,
        # One warp needs no barriers; more only where its registers would not hold the slices.
        "num_warps": 1 if block_s * block_e <= 2048 else 4,
    }  # fmt: skip
    _route_kernel[(num_rows,)](logits, count, physical, ids, weights, num_rows, **options)
    return ids, weights
