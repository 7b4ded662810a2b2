"""Attention of a few rows a request over the slotted cache, read in place and split over positions (flash-decoding).

A program takes one K/V head of one request and one part of its positions. The query rows of the whole group (Q rows times
the query heads of that K/V head) are the rows of one matrix, so K and V are read once. The number of parts is fixed by the
shapes; where they begin follows the limits on the device, so that every part works however little of the cache is in use.
"""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait

MAX_SPLITS = 64
MIN_BLOCKS = 3


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    limits_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_position_stride,
    k_head_stride,
    v_slot_stride,
    v_position_stride,
    v_head_stride,
    context_len,
    scale_log2,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    kv_head = tl.program_id(0) // ROW_BLOCKS
    row_block = tl.program_id(0) % ROW_BLOCKS
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)

    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < Q * GROUP
    row = request * Q + m // GROUP
    head = kv_head * GROUP + m % GROUP
    cols = tl.arange(0, D)
    limits = tl.load(limits_ptr + row, mask=real, other=0)
    limits = tl.minimum(limits, context_len).to(tl.int32)
    longest = tl.max(limits, axis=0)
    slot = tl.load(slots_ptr + request).to(tl.int64)

    # Whole blocks shared out over the parts; parts left without one end here.
    chunk = tl.cdiv(tl.cdiv(longest, BLOCK_N), NUM_SPLITS) * BLOCK_N
    begin = split * chunk
    end = tl.minimum(begin + chunk, longest)

    q_place = row[:, None] * q_row_stride + head[:, None] * q_head_stride + cols[None, :]
    q = tl.load(q_ptr + q_place, mask=real[:, None], other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    k_base = k_ptr + slot * k_slot_stride + kv_head * k_head_stride
    v_base = v_ptr + slot * v_slot_stride + kv_head * v_head_stride

    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        # Nothing at or above the longest limit is loaded: it may be stale, NaN included, and 0 · NaN is NaN.
        held = n < longest
        k = tl.load(k_base + n[:, None].to(tl.int64) * k_position_stride + cols[None, :], mask=held[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(n[None, :] < limits[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet must not subtract −inf from −inf.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_base + n[:, None].to(tl.int64) * v_position_stride + cols[None, :], mask=held[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = new_best

    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    place = row * NUM_HEADS + head
    if NUM_SPLITS == 1:
        tl.store(out_ptr + place[:, None] * D + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        place = place * NUM_SPLITS + split
        tl.store(lse_ptr + place, tl.where(seen, best + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=real)
        # Rows without a share store none: the sum below leaves them out by their −inf.
        tl.store(part_ptr + place[:, None] * D + cols[None, :], acc, mask=(real & seen)[:, None])


@triton.jit
def _combine(
    part_ptr,
    lse_ptr,
    out_ptr,
    D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    place = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    cols = tl.arange(0, D)
    lse = tl.load(lse_ptr + place * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=float("-inf"))
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, axis=0)
    shares = lse > float("-inf")
    parts = tl.load(
        part_ptr + (place * NUM_SPLITS + splits[:, None]) * D + cols[None, :], mask=shares[:, None], other=0.0
    )
    out = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + place * D + cols, out.to(out_ptr.dtype.element_ty))


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def choose_splits(programs: int, context_len: int, block_n: int, processors: int) -> int:
    """Parts of the positions such that ``programs`` times parts is at most one wave over the ``processors``.

    A part has `MIN_BLOCKS` blocks at least: more parts than that take longer to add up than they save.
    """
    return max(1, min(processors // programs, -(-context_len // (MIN_BLOCKS * block_n)), MAX_SPLITS))


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    key_limits: Tensor,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """As `reference.decode_attention`; d a power of two, 16 to 256."""
    (rows, h, d), (_, context_len, h_kv, _), b = q.shape, k_cache.shape, slots.shape[0]
    if rows % b or h % h_kv or key_limits.shape != (rows,):
        raise ValueError(
            f"q {tuple(q.shape)}, slots {tuple(slots.shape)}, key_limits {tuple(key_limits.shape)} and caches "
            f"{tuple(k_cache.shape)} do not belong together: q has Q rows a slot and a multiple of the caches' heads."
        )
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("head_dim must be contiguous in q and both caches; call .contiguous().")
    slots, key_limits = slots.contiguous(), key_limits.contiguous()
    q_rows, group = rows // b, h // h_kv
    wide = q.dtype == torch.float32  # products without tensor cores: smaller tiles, more warps, or registers spill
    block_m = min(32 if wide else 64, max(16, triton.next_power_of_2(q_rows * group)))
    row_blocks = -(-q_rows * group // block_m)
    block_n = 32 if wide or d > 128 else 64
    programs = b * h_kv * row_blocks
    if num_splits is None:
        num_splits = choose_splits(programs, context_len, block_n, _num_processors(q.device))
    out = torch.empty(rows, h * d, dtype=q.dtype, device=q.device)
    chain = options(chains(q.device))
    if num_splits == 1:
        parts, lse = out, out
    else:
        parts = torch.empty(rows, h, num_splits, d, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, h, num_splits, dtype=torch.float32, device=q.device)
    _attend[(h_kv * row_blocks, num_splits, b)](
        q,
        k_cache,
        v_cache,
        slots,
        key_limits,
        out,
        parts,
        lse,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        context_len,
        d**-0.5 * 1.4426950408889634,
        Q=q_rows,
        GROUP=group,
        NUM_HEADS=h,
        D=d,
        NUM_SPLITS=num_splits,
        ROW_BLOCKS=row_blocks,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=2 if wide else 3,
        PRECISION="ieee" if wide else "tf32",
        num_warps=8 if wide else 4,
        **chain,
    )
    if num_splits > 1:
        _combine[(rows * h,)](
            parts,
            lse,
            out,
            D=d,
            NUM_SPLITS=num_splits,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            num_warps=4 if num_splits * d > 2048 else 1,
            **chain,
        )
    return out
