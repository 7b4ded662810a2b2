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
from dspark_kernels.norm import add_rms_norm
from dspark_kernels.qkv import k_norm_rope_write, qk_norm_rope_write

if TYPE_CHECKING:
    from dspark_lab.models.attention import Attention
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
    """`Decoder.run`, with the residual sums inside the norms: layer i's raw output is the sum that the next norm makes."""
    x, residual = decoder.embed_tokens(batch.input_ids), None
    captured = [x] if -1 in capture_layers else []
    slots, eps = batch.token_slots, decoder.cfg.rms_norm_eps
    for i, layer in enumerate(decoder.decoder_layers):
        normed, residual = add_rms_norm(x, residual, layer.input_layernorm.weight, eps)
        if i and i - 1 in capture_layers:
            captured.append(residual)
        x = attend(layer.self_attn, normed, i, batch, slots, cache, decoder.rope.inv_freq)
        normed, residual = add_rms_norm(x, residual, layer.post_attention_layernorm.weight, eps)
        x = layer.mlp(normed, batch)
    hidden, residual = add_rms_norm(x, residual, decoder.norm.weight, eps)
    if len(decoder.layers) - 1 in capture_layers:
        captured.append(residual)
    return hidden, captured


def attend(
    attention: Attention, x: Tensor, layer: int, batch: ForwardBatch, slots: Tensor, cache: KVCache, inv_freq: Tensor
) -> Tensor:
    """`Attention.forward`: one product, one kernel for norms, turn and cache write, attention on the cache in place."""
    assert attention.qkv_weight is not None
    q = qk_norm_rope_write(
        F.linear(x, attention.qkv_weight),
        attention.q_norm.weight,
        attention.k_norm.weight,
        batch.positions,
        inv_freq,
        slots,
        cache.k[layer],
        cache.v[layer],
        attention.q_norm.eps,
    )
    y = decode_attention(q, cache.k[layer], cache.v[layer], batch.req_slots, batch.key_limits)
    return attention.o_proj(y)


def write_context(drafter: Drafter, aux: Tensor, slots: Tensor, positions: Tensor, cache: KVCache) -> None:
    """`Drafter.write_context`."""
    context, _ = add_rms_norm(drafter.fc(aux), None, drafter.hidden_norm.weight, drafter.hidden_norm.eps)
    for i, layer in enumerate(drafter.decoder_layers):
        attention = layer.self_attn
        assert attention.qkv_weight is not None
        kv = F.linear(context, attention.qkv_weight[attention.num_heads * attention.head_dim :])
        weight, eps = attention.k_norm.weight, attention.k_norm.eps
        k_norm_rope_write(kv, weight, positions, drafter.rope.inv_freq, slots, cache.k[i], cache.v[i], eps)
