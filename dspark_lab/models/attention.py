"""Attention over the KV cache: RMSNorm, rotary positions, grouped queries with query and key norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_lab.config.parts import DecoderConfig
from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.kvcache import KVCache
from dspark_lab.models.shards import RowLinear, column_linear


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, width: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rope(nn.Module):
    """Rotary position tables, for any positions. The frequencies stay float32 when the module is cast."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        return 1.0 / (self.theta ** (steps / self.head_dim))

    def _apply(self, fn: Any, recurse: bool = True) -> Rope:
        super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] of ``positions`` [T]."""
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [T, heads, head_dim] turned by its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What all layers of one forward share: built once a batch."""

    batch: ForwardBatch
    cache: KVCache
    slots: Tensor
    """[T] the cache slot of each row."""
    cos: Tensor
    sin: Tensor
    mask: Tensor
    """[B, 1, Q·g, max_keys] bool, True where a row sees a key; g query heads share a K/V head."""


def rows_of(batch: ForwardBatch, cache: KVCache, rope: Rope, cfg: DecoderConfig, dtype: torch.dtype) -> Rows:
    """Position tables and the mask of ``batch``."""
    group = cfg.num_attention_heads // cfg.num_key_value_heads
    cos, sin = rope(batch.positions, dtype)
    keys = torch.arange(batch.max_keys, device=batch.positions.device)
    limits = batch.key_limits if batch.ragged is None else batch.ragged.key_limits
    seen = keys < limits.view(batch.batch_size, 1, batch.num_tokens_per_req, 1)
    return Rows(batch=batch, cache=cache, slots=batch.token_slots, cos=cos, sin=sin, mask=seen.repeat(1, 1, group, 1))


class Attention(nn.Module):
    """Grouped-query attention over one rank's heads; names as in Hugging Face's Qwen3."""

    def __init__(
        self, cfg: DecoderConfig, tp: RankGroup = ONE_RANK, *, in_features: int | None = None, **factory: Any
    ) -> None:
        """``in_features``: width of the rows that come in, by default the hidden size, which is what goes out."""
        super().__init__()
        bias, self.head_dim = cfg.attention_bias, cfg.head_dim
        width = in_features or cfg.hidden_size
        self.num_heads, self.num_kv_heads = cfg.num_attention_heads // tp.size, cfg.num_key_value_heads // tp.size
        heads, kv_heads = cfg.num_attention_heads * self.head_dim, cfg.num_key_value_heads * self.head_dim
        self.q_proj = column_linear(width, heads, tp, bias=bias, **factory)
        self.k_proj = column_linear(width, kv_heads, tp, bias=bias, **factory)
        self.v_proj = column_linear(width, kv_heads, tp, bias=bias, **factory)
        self.o_proj = RowLinear(heads, cfg.hidden_size, tp, bias=bias, **factory)
        self.q_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps, **factory)
        self.k_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps, **factory)
        self.qkv_weight: Tensor | None = None
        """The three projections one behind the other, where `fused.join_weights` laid them so."""

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """K (normed and rotated) and V (neither), both [T, num_kv_heads, head_dim], of ``x`` [T, H]."""
        shape = (x.shape[0], self.num_kv_heads, self.head_dim)
        return rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin), self.v_proj(x).view(shape)

    def forward(self, x: Tensor, layer: int, rows: Rows) -> Tensor:
        """``x`` [T, H] to [T, H]; writes the rows' K/V at their positions, then reads the cache up to each row's limit."""
        b, q_rows = rows.batch.batch_size, rows.batch.num_tokens_per_req
        group = self.num_heads // self.num_kv_heads
        k, v = self.keys_values(x, rows.cos, rows.sin)
        rows.cache.write(layer, rows.slots, rows.batch.positions, k, v)
        k, v = rows.cache.read(layer, rows.batch.req_slots, rows.batch.max_keys)
        q = rotate(self.q_norm(self.q_proj(x).view(x.shape[0], self.num_heads, self.head_dim)), rows.cos, rows.sin)
        ragged = rows.batch.ragged
        if ragged is not None:  # K and V lie by request, so the rows go to their places and back
            q = ragged.index.to_places(q)
        # The query heads of one K/V head become rows of one matrix: K and V are read once and never repeated.
        q = q.view(b, q_rows, self.num_kv_heads, group, self.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(b, self.num_kv_heads, group * q_rows, self.head_dim)
        y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=rows.mask)
        y = y.view(b, self.num_kv_heads, group, q_rows, self.head_dim).permute(0, 3, 1, 2, 4)
        y = y.reshape(b * q_rows, self.num_heads * self.head_dim)
        return self.o_proj(y if ragged is None else ragged.index.to_rows(y))
