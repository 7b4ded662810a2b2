"""Attention of decode rows over the slotted KV cache, read in place."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.attention import reference
from dspark_kernels.backend import on_triton


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    key_limits: Tensor,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """Rows ``q`` [B·Q, h, d], Q of each request, over caches [S, ctx, h_kv, d] of one layer, to [B·Q, h·d].

    ``slots`` [B] int64 is the slot of each request; row i sees its slot's positions below ``key_limits[i]`` ([B·Q] int64;
    causal rows: position + 1, a draft block: the block's end). 0 or less gives zeros; over ctx counts as ctx. Positions at or
    above the largest limit of a request's rows are never read: they may hold NaN. Scores are scaled by d^−½, softmax and
    sums are float32.

    ``num_splits`` parts of the positions run side by side (None: as many as fill the GPU once, from B, h_kv and ctx alone, so
    that a captured graph keeps its geometry). The result depends on it by rounding. Triton on CUDA and under
    TRITON_INTERPRET=1 where d is a power of two of 16 to 256, plain torch elsewhere.
    """
    d = q.shape[2]
    fits = 16 <= d <= 256 and d & (d - 1) == 0
    if fits and (on_triton(q)):
        from dspark_kernels.attention import kernel

        return kernel.decode_attention(q, k_cache, v_cache, slots, key_limits, num_splits=num_splits)
    return reference.decode_attention(q, k_cache, v_cache, slots, key_limits, num_splits=num_splits)


__all__ = ["decode_attention"]
