"""Whole sequences through decoder layers, differentiable: what training needs beside the decode path, on the same modules.

The decode path writes K/V into a cache in place, one block a request, under inference mode. Here all positions of B sequences
of T rows run at once, and gradients flow. Same weights, same formulas; tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_lab.models.attention import Attention, rotate
from dspark_lab.models.decoder import Decoder, DecoderLayer, Mlp
from dspark_lab.models.moe import MoE


@dataclass(frozen=True, kw_only=True)
class States:
    """What a causal forward gives."""

    hidden: Tensor
    """[B, T, H] after the final norm."""
    aux: Tensor
    """[B, T, n·H] raw outputs of the captured layers, side by side."""
    balance: Tensor
    """Scalar: Σ over MoE layers of E · Σ_e (share of rows · mean probability); 1 a layer where experts are used alike."""


def causal_forward(decoder: Decoder, tokens: Tensor, capture_layers: tuple[int, ...] = ()) -> States:
    """``tokens`` [B, T] int64 from position 0 on; ``capture_layers`` as in `Decoder.run`."""
    b, t = tokens.shape
    x = decoder.embed_tokens(tokens)
    positions = torch.arange(t, device=tokens.device).expand(b, t)
    turn = turns(decoder, positions, x.dtype)
    captured = [x] if -1 in capture_layers else []
    balance = torch.zeros((), device=tokens.device)
    for i, layer in enumerate(decoder.decoder_layers):
        y = layer.input_layernorm(x)
        k, v = keys_values(layer.self_attn, y, turn)
        x = x + attend(layer.self_attn, queries(layer.self_attn, y, turn), k, v, causal=True)
        y, uneven = feed_forward(layer, layer.post_attention_layernorm(x))
        x, balance = x + y, balance + uneven
        if i in capture_layers:
            captured.append(x)
    hidden = decoder.norm(x)
    aux = torch.cat(captured, dim=-1) if captured else hidden.new_empty(b, t, 0)
    return States(hidden=hidden, aux=aux, balance=balance)


Turn = tuple[Tensor, Tensor]
"""cos and sin, [B·T, 1, head_dim]."""


def turns(decoder: Decoder, positions: Tensor, dtype: torch.dtype) -> Turn:
    """Rotary tables of ``positions`` [B, T]."""
    return decoder.rope(positions.flatten(), dtype)


def queries(attention: Attention, x: Tensor, turn: Turn) -> Tensor:
    """[B, heads, T, head_dim] of ``x`` [B, T, H]."""
    b, t, _ = x.shape
    q = attention.q_norm(attention.q_proj(x).view(b * t, attention.num_heads, attention.head_dim))
    return rotate(q, *turn).view(b, t, attention.num_heads, attention.head_dim).transpose(1, 2)


def keys_values(attention: Attention, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """K and V [B, kv heads, T, head_dim] of ``x`` [B, T, H]."""
    b, t, _ = x.shape
    shape = (b, t, attention.num_kv_heads, attention.head_dim)
    k, v = attention.keys_values(x.flatten(0, 1), *turn)
    return k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)


def attend(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """[B, T, H] of ``q`` [B, heads, T, d] over ``k``, ``v`` [B, kv heads, S, d]; ``mask`` [B, 1, T, S] bool, true where seen."""
    group = attention.num_heads // attention.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return attention.o_proj(y.transpose(1, 2).flatten(2))


def feed_forward(layer: DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor | float]:
    """The layer's MLP or experts on ``x`` [B, T, H], and how unevenly experts were used (0 without)."""
    mlp: Any = layer.mlp
    if isinstance(mlp, Mlp):
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)), 0.0
    y, balance = moe(mlp, x.flatten(0, 1))
    return y.view_as(x), balance


def moe(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [N, H] to [N, H] and the balance of this layer: 1 where all experts are used alike, E where one does all.

    On a GPU every expert computes every row and the router's weights, 0 for most, pick: small experts in two products, no
    sorting, no waiting. On a CPU rows go to their experts only.
    """
    router, experts = layer.gate, layer.experts
    probs = F.linear(x, router.weight).softmax(dim=-1, dtype=torch.float32)
    weights, ids = probs.topk(router.topk, dim=-1)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    num = probs.shape[-1]
    picked = torch.zeros_like(probs).scatter(1, ids, 1.0)
    balance = num * (picked.mean(dim=0) / router.topk * probs.mean(dim=0)).sum()
    if x.is_cuda:
        each = torch.zeros_like(probs).scatter(1, ids, weights).to(x.dtype)
        gate, up = F.linear(x, experts.gate_up_proj.flatten(0, 1)).view(x.shape[0], num, -1).chunk(2, dim=-1)
        inner = F.silu(gate) * up * each[..., None]
        return inner.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1), balance
    y = experts._grouped(x, ids) if experts._groups() else experts._dense(x, ids)
    return (y.float() * weights[..., None]).sum(dim=1).to(x.dtype), balance
