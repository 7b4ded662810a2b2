"""`Decoder`, the stack of layers that target and drafter share, and `Target`. Parameter names are Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_kernels.accept import argmax_rows
from dspark_kernels.linear import Slices
from dspark_kernels.norm import add_rms_norm
from dspark_lab.config.parts import DecoderConfig
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.ep.load import EpLoad
from dspark_lab.errors import LabError
from dspark_lab.models import fused
from dspark_lab.models.attention import Attention, RMSNorm, Rope, Rows, rows_of
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.kvcache import KVCache
from dspark_lab.models.moe import MoE
from dspark_lab.models.shards import RowLinear, VocabEmbedding, Vocabulary, column_linear


class Mlp(nn.Module):
    """SwiGLU; a rank computes its part of the inner dimension."""

    def __init__(self, cfg: DecoderConfig, tp: RankGroup, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = column_linear(cfg.hidden_size, cfg.intermediate_size, tp, **factory)
        self.up_proj = column_linear(cfg.hidden_size, cfg.intermediate_size, tp, **factory)
        self.down_proj = RowLinear(cfg.intermediate_size, cfg.hidden_size, tp, **factory)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def behind_norm(
        self, x: Tensor | Slices, residual: Tensor, norm_weight: Tensor, eps: float, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """`forward` of the RMS norm of ``x`` + ``residual`` [T, H], and that sum; few rows on a GPU."""
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
        return self(normed, batch), total


class DecoderLayer(nn.Module):
    """Attention, then a dense or a mixture-of-experts MLP, each after a norm and beside a residual."""

    def __init__(self, cfg: DecoderConfig, layer: int, group: ExpertGroup, tp: RankGroup, **factory: Any) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn = Attention(cfg, tp, **factory)
        moe_layer = sum(map(cfg.is_moe_layer, range(layer)))
        self.mlp = MoE(cfg, group, moe_layer, **factory) if cfg.is_moe_layer(layer) else Mlp(cfg, tp, **factory)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, **factory)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, **factory)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), self.layer, rows)
        return x + self.mlp(self.post_attention_layernorm(x), rows.batch)


class Decoder(nn.Module):
    """Embedding, layers, final norm. Weights are not set at construction: see `weights` and `checkpoint`."""

    def __init__(
        self,
        cfg: DecoderConfig,
        group: ExpertGroup | None = None,
        tp: RankGroup = ONE_RANK,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        group, factory = group or ExpertGroup(), {"device": device, "dtype": dtype}
        if tp.size != group.parallel.tp_size:
            raise LabError(f"tp_size={group.parallel.tp_size} and a TP group of size {tp.size} do not go together.")
        self.cfg, self.group, self.tp, self.dtype = cfg, group, tp, dtype
        self.vocab = Vocabulary(cfg.vocab_size, tp)
        self.embed_tokens = VocabEmbedding(self.vocab, cfg.hidden_size, **factory)
        self.layers = nn.ModuleList(DecoderLayer(cfg, i, group, tp, **factory) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, **factory)
        self.rope = Rope(cfg.head_dim, cfg.rope_theta, device)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on this rank."""
        return sum(p.nbytes for p in self.parameters())

    @property
    def moe_layers(self) -> list[MoE]:
        return [m for m in self.modules() if isinstance(m, MoE)]

    def new_cache(self, num_slots: int, context_len: int) -> KVCache:
        """A cache of this rank's K/V heads, of ``num_slots`` requests and the dummy slot."""
        c, heads = self.cfg, self.cfg.num_key_value_heads // self.tp.size
        return KVCache(c.num_hidden_layers, num_slots, context_len, heads, c.head_dim, self.dtype, self.device)

    def watch_load(self) -> EpLoad | None:
        """Lets every MoE layer count its rows from now on; None without MoE layers."""
        layers = self.moe_layers
        if not layers:
            return None
        load = EpLoad(
            num_layers=len(layers),
            num_local_experts=len(layers[0].experts.expert_ids),
            device=self.device,
            dispatchers=[layer.dispatcher for layer in layers],
        )
        for i, layer in enumerate(layers):
            layer.load, layer.load_layer = load, i
        return load

    def run(
        self, batch: ForwardBatch, cache: KVCache, capture_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Final-normed hidden [T, H], and the raw outputs [T, H] of ``capture_layers`` (−1: the embedding)."""
        if self.runs_fused and fused.few_rows(batch):
            return self._run_fused(batch, cache, capture_layers)
        x = self.embed_tokens(batch.input_ids)
        rows = rows_of(batch, cache, self.rope, self.cfg, self.dtype)
        captured = [x] if -1 in capture_layers else []
        for i, layer in enumerate(self.layers):
            x = layer(x, rows)
            if i in capture_layers:
                captured.append(x)
        return self.norm(x), captured

    @property
    def runs_fused(self) -> bool:
        """Whether decode rows go through fused kernels: bfloat16 on CUDA, and attention weights that lie side by side."""
        on = fused.ENABLED and self.device.type == "cuda" and self.dtype == torch.bfloat16
        return on and all(layer.self_attn.qkv_weight is not None for layer in self.decoder_layers)

    def _run_fused(
        self, batch: ForwardBatch, cache: KVCache, capture_layers: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """`run`, with the residual sums inside the norms, and the norms inside the products that follow them.

        Layer i's raw output is the sum that the next norm makes.
        """
        x, residual = self.embed_tokens(batch.input_ids), None
        captured = [x] if -1 in capture_layers else []
        slots, inv_freq = batch.token_slots, self.rope.inv_freq
        for i, layer in enumerate(self.decoder_layers):
            assert layer.self_attn.qkv_weight is not None
            qkv, residual = fused.norm_product(x, residual, layer.input_layernorm, layer.self_attn.qkv_weight)
            if i and i - 1 in capture_layers:
                captured.append(residual)
            x = fused.attend(layer.self_attn, qkv, i, batch, slots, cache, inv_freq)
            norm = layer.post_attention_layernorm
            x, residual = layer.mlp.behind_norm(x, residual, norm.weight, norm.eps, batch)
        hidden, residual = add_rms_norm(x, residual, self.norm.weight, self.norm.eps)
        if len(self.layers) - 1 in capture_layers:
            captured.append(residual)
        return hidden, captured


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """What one forward of the target gives."""

    hidden: Tensor
    """[T, H] after the final norm."""
    aux: Tensor
    """[T, n·H] raw outputs of the captured layers, side by side in order: the draft context."""


class Target(nn.Module):
    """The model that is being decoded."""

    def __init__(
        self,
        cfg: DecoderConfig,
        group: ExpertGroup | None = None,
        tp: RankGroup = ONE_RANK,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Decoder(cfg, group, tp, device=device, dtype=dtype)
        tied = cfg.tie_word_embeddings
        self.lm_head = None if tied else column_linear(cfg.hidden_size, cfg.vocab_size, tp, device=device, dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on this rank."""
        return sum(p.nbytes for p in self.parameters())

    def new_cache(self, num_slots: int, context_len: int) -> KVCache:
        return self.model.new_cache(num_slots, context_len)

    def watch_load(self) -> EpLoad | None:
        return self.model.watch_load()

    def forward(self, batch: ForwardBatch, cache: KVCache, *, capture_layers: tuple[int, ...] = ()) -> TargetOutput:
        """One forward over ``batch``; ``capture_layers`` strictly increase, −1 is the embedding output."""
        hidden, captured = self.model.run(batch, cache, capture_layers)
        return TargetOutput(
            hidden=hidden, aux=torch.cat(captured, dim=-1) if captured else hidden.new_empty(hidden.shape[0], 0)
        )

    def local_logits(self, hidden: Tensor) -> Tensor:
        """[.., H] to this rank's columns [.., V_local]."""
        return F.linear(hidden, self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] to [.., V], gathered over the TP ranks."""
        return self.model.vocab.gather(self.local_logits(hidden))

    def argmax(self, hidden: Tensor) -> Tensor:
        """[.., H] to the best token [..] int64, the lowest id of equals; at TP > 1 no logits travel."""
        logits = self.local_logits(hidden)
        if fused.suits(logits) and self.model.tp.size == 1 and logits.dim() == 2:
            return argmax_rows(logits)
        return self.model.vocab.argmax(logits)
