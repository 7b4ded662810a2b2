"""Query and key norm, rotary turn and cache write in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _turned(x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, eps: float) -> Tensor:
    """``x`` [T, heads, d], RMS-normed over d and turned by its position, half-split (as Hugging Face's Qwen3)."""
    x = F.rms_norm(x, weight.shape, weight, eps)
    angles = positions[:, None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat((-second, first), dim=-1) * angles.sin().to(x.dtype)


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
    """``qkv`` [T, (h + 2·h_kv)·d] to q [T, h, d]; K and V of the rows go to (``slots``, ``positions``) of the caches.

    ``q_weight``, ``k_weight`` [d]; ``positions``, ``slots`` [T] int64; ``inv_freq`` [d/2] float32; ``k_cache``, ``v_cache``
    [S, ctx, h_kv, d].
    """
    h_kv, d = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, d)
    q = _turned(heads[:, : -2 * h_kv], q_weight, positions, inv_freq, eps)
    k_norm_rope_write(heads[:, -2 * h_kv :].flatten(1), k_weight, positions, inv_freq, slots, k_cache, v_cache, eps)
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
    """``kv`` [T, 2·h_kv·d]: keys, normed and turned, and values as they are to (``slots``, ``positions``) of the caches."""
    h_kv, d = k_cache.shape[2:]
    heads = kv.reshape(kv.shape[0], 2 * h_kv, d)
    k_cache[slots, positions] = _turned(heads[:, :h_kv], k_weight, positions, inv_freq, eps)
    v_cache[slots, positions] = heads[:, h_kv:]
