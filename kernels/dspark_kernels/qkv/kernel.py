"""Query and key norm, rotary turn and cache write as one kernel: a program a head of a row."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait
from dspark_kernels.linear.kernel import add_slices, row_scale
from dspark_kernels.linear.reference import Slices


@triton.jit
def _norm_rope_write(
    qkv_ptr,
    squares_ptr,
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
    num_rows,
    norm_eps,
    NORM_K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    cols = tl.arange(0, BLOCK_HALF)
    inside = cols < HALF
    dtype = k_cache_ptr.dtype.element_ty
    source = row * qkv_stride + head * D + cols
    if NUM_SLICES > 0:
        stride = num_rows * qkv_stride
        first = add_slices(qkv_ptr, source, inside, stride, NUM_SLICES)
        second = add_slices(qkv_ptr, source + HALF, inside, stride, NUM_SLICES)
        if squares_ptr is not None:
            row_norm = row_scale(squares_ptr, row, num_rows, norm_eps, NORM_K, NUM_SLICES)
            first, second = first * row_norm, second * row_norm
        first, second = first.to(dtype), second.to(dtype)
    else:
        first = tl.load(qkv_ptr + source, mask=inside, other=0.0)
        second = tl.load(qkv_ptr + source + HALF, mask=inside, other=0.0)
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
    qkv: Tensor | Slices,
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
    rows, width = (qkv.parts if isinstance(qkv, Slices) else qkv).shape[-2:]
    num_q = width // d - 2 * h_kv
    q = torch.empty(rows, num_q, d, dtype=k_cache.dtype, device=k_cache.device)
    _launch(qkv, q_weight, k_weight, positions, inv_freq, slots, q, k_cache, v_cache, eps, num_q)
    return q


def k_norm_rope_write(
    kv: Tensor | Slices,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> None:
    """As `reference.k_norm_rope_write`; ``kv`` may be a slice of columns."""
    _launch(kv, k_weight, k_weight, positions, inv_freq, slots, k_cache, k_cache, v_cache, eps, 0)


def _launch(
    qkv: Tensor | Slices,
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
    source = qkv.parts if isinstance(qkv, Slices) else qkv
    dtype = qkv.total.dtype if isinstance(qkv, Slices) else qkv.dtype
    rows, width = source.shape[-2:]
    if num_q < 0 or width != (num_q + 2 * h_kv) * d or d % 2:
        raise ValueError(f"{width} columns do not hold whole heads of {d} beside {h_kv} keys and values.")
    if source.stride(-1) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the last dimension of the rows and of both caches must be contiguous; call .contiguous().")
    if k_cache.dtype != dtype or v_cache.dtype != dtype or v_cache.shape != k_cache.shape:
        raise ValueError(f"caches of {k_cache.dtype}, {v_cache.dtype} and rows of {dtype} must share dtype and shape.")
    if positions.shape != slots.shape or positions.shape != (rows,):
        raise ValueError(f"positions {tuple(positions.shape)} and slots {tuple(slots.shape)} must have a value a row.")
    if rows == 0:
        return
    # An expanded slot (stride 0) would be read beyond its one element.
    positions, slots = positions.contiguous(), slots.contiguous()
    half = triton.next_power_of_2(d // 2)
    sliced = isinstance(qkv, Slices)
    _norm_rope_write[(rows, num_q + 2 * h_kv)](
        source,
        qkv.squares if sliced else None,
        q_weight,
        k_weight,
        positions,
        inv_freq,
        slots,
        q,
        k_cache,
        v_cache,
        source.stride(-2),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        num_slots,
        context_len,
        eps,
        rows,
        qkv.eps if sliced else 0.0,
        NORM_K=qkv.total.shape[1] if sliced else 1,
        NUM_SLICES=source.shape[0] if sliced else 0,
        NUM_Q=num_q,
        NUM_KV=h_kv,
        D=d,
        BLOCK_HALF=half,
        num_warps=1,
        **options(chains(source.device)),
    )
