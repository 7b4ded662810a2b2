"""`decode_attention` in plain torch: gathers the cache, then softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    key_limits: Tensor,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """``q`` [B·Q, h, d], caches [S, ctx, h_kv, d], ``slots`` [B], ``key_limits`` [B·Q] to [B·Q, h·d].

    A row sees the positions of its request's slot below its limit; a limit of 0 or less gives zeros. ``num_splits`` is
    without effect here.
    """
    (rows, h, d), (_, ctx, h_kv, _), b = q.shape, k_cache.shape, slots.shape[0]
    queries = q.view(b, rows // b, h_kv, h // h_kv, d).float()
    k, v = k_cache[slots].float(), v_cache[slots].float()
    seen = torch.arange(ctx, device=q.device) < key_limits.view(b, -1, 1)
    # What nobody sees may be stale, NaN included, and 0 · NaN is NaN.
    stale = ~seen.any(dim=1)[:, :, None, None]
    k, v = k.masked_fill(stale, 0.0), v.masked_fill(stale, 0.0)
    scores = torch.einsum("bqcgd,bncd->bqcgn", queries, k) * d**-0.5
    scores = scores.masked_fill(~seen[:, :, None, None], float("-inf"))
    weights = scores.softmax(dim=-1).masked_fill(~seen[:, :, None, None], 0.0)
    return torch.einsum("bqcgn,bncd->bqcgd", weights, v).reshape(rows, h * d).to(q.dtype)
