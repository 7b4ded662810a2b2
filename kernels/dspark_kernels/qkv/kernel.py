"""Query and key norm, rotary turn and cache write as one kernel: a program a head of a row."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_rope_write(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    inv_freq_ptr,
    slots_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    qkv_stride,
    k_slot_stride,
    k_position_stride,
    k_head_stride,
    v_slot_stride,
    v_position_stride,
    v_head_stride,
    num_slots,
    context_len,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    cols = tl.arange(0, BLOCK_HALF)
    inside = cols < HALF
    source = qkv_ptr + row * qkv_stride + head * D + cols
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    position = tl.load(positions_ptr + row).to(tl.int64)

    if head < NUM_Q + NUM_KV:
        weight_ptr = k_weight_ptr
        if head < NUM_Q:
            weight_ptr = q_weight_ptr
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
        a = a * scale * tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weight_ptr + HALF + cols, mask=inside, other=0.0).to(tl.float32)
        angle = position.to(tl.float32) * tl.load(inv_freq_ptr + cols, mask=inside, other=0.0)
        # Rounded wherever the chain of torch operations rounds, so that both give the same tokens.
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
        cos, sin = tl.cos(angle).to(dtype).to(tl.float32), tl.sin(angle).to(dtype).to(tl.float32)
        first = ((a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)).to(dtype)
        second = ((b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)).to(dtype)

    if head < NUM_Q:
        q_target = q_ptr + (row * NUM_Q + head) * D + cols
        tl.store(q_target, first, mask=inside)
        tl.store(q_target + HALF, second, mask=inside)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        # A padded row may carry any number; one outside the cache is dropped, never written elsewhere.
        kept = inside & (slot >= 0) & (slot < num_slots) & (position >= 0) & (position < context_len)
        if head < NUM_Q + NUM_KV:
            k_target = (
                k_cache_ptr + slot * k_slot_stride + position * k_position_stride + (head - NUM_Q) * k_head_stride
            )
            tl.store(k_target + cols, first, mask=kept)
            tl.store(k_target + HALF + cols, second, mask=kept)
        else:
            v_head = head - NUM_Q - NUM_KV
            v_target = v_cache_ptr + slot * v_slot_stride + position * v_position_stride + v_head * v_head_stride
            tl.store(v_target + cols, first, mask=kept)
            tl.store(v_target + HALF + cols, second, mask=kept)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> Tensor:
    """As `reference.qk_norm_rope_write`. Rows of ``qkv`` and the caches' outer dimensions may be strided."""
    h_kv, d = k_cache.shape[2:]
    num_q = qkv.shape[1] // d - 2 * h_kv
    q = torch.empty(qkv.shape[0], num_q, d, dtype=qkv.dtype, device=qkv.device)
    _launch(qkv, q_weight, k_weight, positions, inv_freq, slots, q, k_cache, v_cache, eps, num_q)
    return q


def k_norm_rope_write(
    kv: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> None:
    """As `reference.k_norm_rope_write`; ``kv`` may be a slice of columns."""
    _launch(kv, k_weight, k_weight, positions, inv_freq, slots, kv, k_cache, v_cache, eps, 0)


def _launch(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    num_q: int,
) -> None:
    num_slots, context_len, h_kv, d = k_cache.shape
    if num_q < 0 or qkv.shape[1] != (num_q + 2 * h_kv) * d or d % 2:
        raise ValueError(f"{qkv.shape[1]} columns do not hold whole heads of {d} beside {h_kv} keys and values.")
    if qkv.stride(1) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the last dimension of the rows and of both caches must be contiguous; call .contiguous().")
    if k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"caches of {k_cache.dtype}, {v_cache.dtype} and rows of {qkv.dtype} must share dtype and shape."
        )
    if positions.shape != slots.shape or positions.shape != qkv.shape[:1]:
        raise ValueError(f"positions {tuple(positions.shape)} and slots {tuple(slots.shape)} must have a value a row.")
    if qkv.shape[0] == 0:
        return
    # An expanded slot (stride 0) would be read beyond its one element.
    positions, slots = positions.contiguous(), slots.contiguous()
    half = triton.next_power_of_2(d // 2)
    _norm_rope_write[(qkv.shape[0], num_q + 2 * h_kv)](
        qkv,
        q_weight,
        k_weight,
        positions,
        inv_freq,
        slots,
        q,
        k_cache,
        v_cache,
        qkv.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        num_slots,
        context_len,
        eps,
        NUM_Q=num_q,
        NUM_KV=h_kv,
        D=d,
        BLOCK_HALF=half,
        num_warps=1,
    )
