"""Pieces of the decode path on fused kernels: few rows, bfloat16, CUDA. Elsewhere the plain path of `decoder` and `attention` runs.

Same numbers up to rounding; tests/gpu/test_fused.py holds the two against each other. ``DSPARK_LAB_FUSED=0`` switches it off.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.attention import decode_attention
from dspark_kernels.linear import MAX_ROWS as MAX_SLICED_ROWS
from dspark_kernels.linear import Slices, sliced_linear
from dspark_kernels.norm import add_rms_norm
from dspark_kernels.qkv import qk_norm_rope_write

if TYPE_CHECKING:
    from dspark_lab.models.attention import Attention, RMSNorm
    from dspark_lab.models.batch import ForwardBatch
    from dspark_lab.models.kvcache import KVCache

MAX_ROWS_PER_REQUEST = 16
"""Above that a forward is a prefill."""
MAX_ROWS = 1024
ENABLED = os.environ.get("DSPARK_LAB_FUSED", "1") != "0" and find_spec("triton") is not None


def suits(x: Tensor) -> bool:
    """Whether rows ``x`` [T, …] go through fused kernels."""
    return ENABLED and x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] <= MAX_ROWS


def few_rows(batch: ForwardBatch) -> bool:
    """Whether ``batch`` is one of decode rows: a few of each request."""
    return batch.num_tokens_per_req <= MAX_ROWS_PER_REQUEST and batch.num_tokens <= MAX_ROWS


def join_weights(attention: Attention) -> None:
    """Lays q, k and v one behind the other, so that one product makes all three; the three layers become views of it."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    if any(p.bias is not None for p in parts):
        return
    joined = torch.cat([p.weight.data for p in parts])
    start = 0
    for p in parts:
        rows = p.weight.shape[0]
        p.weight.data = joined[start : start + rows]
        start += rows
    attention.qkv_weight = joined


def norm_product(x: Tensor, residual: Tensor | None, norm: RMSNorm, weight: Tensor) -> tuple[Tensor | Slices, Tensor]:
    """The product of the normed sum ``x`` + ``residual`` with ``weight``, in slices for few rows, and the sum."""
    if x.shape[0] > MAX_SLICED_ROWS:
        normed, total = add_rms_norm(x, residual, norm.weight, norm.eps)
        return F.linear(normed, weight), total
    product = sliced_linear(x, weight, residual=residual, norm_weight=norm.weight, eps=norm.eps)
    return product, product.total


def product(x: Tensor, weight: Tensor) -> Tensor | Slices:
    """``x`` · ``weight``ᵀ, in slices for few rows."""
    return F.linear(x, weight) if x.shape[0] > MAX_SLICED_ROWS else sliced_linear(x, weight)


def attend(
    attention: Attention,
    qkv: Tensor | Slices,
    layer: int,
    batch: ForwardBatch,
    slots: Tensor,
    cache: KVCache,
    inv_freq: Tensor,
) -> Tensor | Slices:
    """`Attention.forward` behind its first product: norms, turn and cache write, attention on the cache in place, o_proj."""
    q = qk_norm_rope_write(
        qkv,
        attention.q_norm.weight,
        attention.k_norm.weight,
        batch.positions,
        inv_freq,
        slots,
        cache.k[layer],
        cache.v[layer],
        attention.q_norm.eps,
    )
    ragged = batch.ragged
    if ragged is None:
        y = decode_attention(q, cache.k[layer], cache.v[layer], batch.req_slots, batch.key_limits)
    else:
        q = ragged.index.to_places(q)
        y = decode_attention(q, cache.k[layer], cache.v[layer], batch.req_slots, ragged.key_limits)
        y = ragged.index.to_rows(y)
    whole = attention.o_proj.tp.size == 1 and attention.o_proj.bias is None
    return product(y, attention.o_proj.weight) if whole else attention.o_proj(y)
