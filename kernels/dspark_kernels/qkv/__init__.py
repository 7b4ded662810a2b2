"""Query and key norm, rotary turn and cache write in one kernel, between the QKV product and attention."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.linear.reference import Slices
from dspark_kernels.qkv import reference


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
    """``qkv`` [T, (h + 2·h_kv)·d] (queries, keys, values side by side; or that product in slices) to q [T, h, d], normed and turned.

    Keys, normed and turned, and values as they are go to (``slots``, ``positions``), both [T] int64, of ``k_cache`` and
    ``v_cache`` [S, ctx, h_kv, d], the caches of one layer. ``q_weight``, ``k_weight`` [d]; ``inv_freq`` [d/2] float32.
    Rounds where the chain of torch operations rounds. On the Triton path a place outside the cache is dropped; where a place
    comes twice, either row may stay. Triton on CUDA and in its interpreter, plain torch elsewhere.
    """
    if on_triton(k_cache):
        from dspark_kernels.qkv import kernel

        return kernel.qk_norm_rope_write(qkv, q_weight, k_weight, positions, inv_freq, slots, k_cache, v_cache, eps)
    qkv = qkv.sum() if isinstance(qkv, Slices) else qkv
    return reference.qk_norm_rope_write(qkv, q_weight, k_weight, positions, inv_freq, slots, k_cache, v_cache, eps)


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
    """The same for context rows, which have no queries: ``kv`` [T, 2·h_kv·d], keys and values side by side."""
    if on_triton(k_cache):
        from dspark_kernels.qkv import kernel

        kernel.k_norm_rope_write(kv, k_weight, positions, inv_freq, slots, k_cache, v_cache, eps)
    else:
        kv = kv.sum() if isinstance(kv, Slices) else kv
        reference.k_norm_rope_write(kv, k_weight, positions, inv_freq, slots, k_cache, v_cache, eps)


__all__ = ["qk_norm_rope_write", "k_norm_rope_write"]
