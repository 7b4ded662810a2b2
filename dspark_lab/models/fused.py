"""The decode path on fused kernels: few rows, bfloat16, CUDA. Elsewhere the plain path of `decoder` and `attention` runs.

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
from dspark_kernels.qkv import k_norm_rope_write, qk_norm_rope_write

if TYPE_CHECKING:
    from dspark_lab.models.attention import Attention, RMSNorm
    from dspark_lab.models.batch import ForwardBatch
    from dspark_lab.models.decoder import Decoder
    from dspark_lab.models.drafter import Drafter
    from dspark_lab.models.kvcache import KVCache

MAX_ROWS_PER_REQUEST = 16
"""Above that a forward is a prefill."""
MAX_ROWS = 1024
ENABLED = os.environ.get("DSPARK_LAB_FUSED", "1") != "0" and find_spec("triton") is not None


def suits(x: Tensor) -> bool:
    """Whether rows ``x`` [T, …] go through fused kernels."""
    return ENABLED and x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] <= MAX_ROWS


def suits_decode(decoder: Decoder, batch: ForwardBatch) -> bool:
    """Whether a whole forward does: decode rows, and attention weights that lie side by side."""
    few = batch.num_tokens_per_req <= MAX_ROWS_PER_REQUEST and batch.num_tokens <= MAX_ROWS
    on = ENABLED and decoder.device.type == "cuda" and decoder.dtype == torch.bfloat16
    return few and on and all(layer.self_attn.qkv_weight is not None for layer in decoder.decoder_layers)


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


def run(
    decoder: Decoder, batch: ForwardBatch, cache: KVCache, capture_layers: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """`Decoder.run`, with the residual sums inside the norms, and the norms inside the products that follow them.

    Layer i's raw output is the sum that the next norm makes.
    """
    x, residual = decoder.embed_tokens(batch.input_ids), None
    captured = [x] if -1 in capture_layers else []
    slots, inv_freq = batch.token_slots, decoder.rope.inv_freq
    for i, layer in enumerate(decoder.decoder_layers):
        assert layer.self_attn.qkv_weight is not None
        qkv, residual = norm_product(x, residual, layer.input_layernorm, layer.self_attn.qkv_weight)
        if i and i - 1 in capture_layers:
            captured.append(residual)
        x = attend(layer.self_attn, qkv, i, batch, slots, cache, inv_freq)
        norm = layer.post_attention_layernorm
        x, residual = layer.mlp.behind_norm(x, residual, norm.weight, norm.eps, batch)
    hidden, residual = add_rms_norm(x, residual, decoder.norm.weight, decoder.norm.eps)
    if len(decoder.layers) - 1 in capture_layers:
        captured.append(residual)
    return hidden, captured


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


def write_context(drafter: Drafter, aux: Tensor, slots: Tensor, positions: Tensor, cache: KVCache) -> None:
    """`Drafter.write_context`."""
    fc = product(aux, drafter.fc.weight)
    context, _ = add_rms_norm(fc, None, drafter.hidden_norm.weight, drafter.hidden_norm.eps)
    for i, layer in enumerate(drafter.decoder_layers):
        attention = layer.self_attn
        assert attention.qkv_weight is not None
        kv = product(context, attention.qkv_weight[attention.num_heads * attention.head_dim :])
        weight, eps = attention.k_norm.weight, attention.k_norm.eps
        k_norm_rope_write(kv, weight, positions, drafter.rope.inv_freq, slots, cache.k[i], cache.v[i], eps)
