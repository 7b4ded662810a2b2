"""A mixture-of-experts layer: router, the experts of one rank, and rows that must not count."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_kernels.experts import experts
from dspark_kernels.linear import Slices
from dspark_kernels.router import NormedRoute, gate_and_route, norm_gate_route
from dspark_lab.config.parts import DecoderConfig
from dspark_lab.device import phase
from dspark_lab.ep.dispatch import Dispatched
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.load import EpLoad
from dspark_lab.ep.padding import consume
from dspark_lab.models import fused
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.shards import Shard, cut


class Router(nn.Module):
    """Softmax over all experts in float32, then the best k, renormalised if the config says so."""

    def __init__(self, cfg: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.topk, self.norm_topk_prob = cfg.num_experts_per_tok, cfg.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size, **factory))

    def forward(self, x: Tensor, *, count: Tensor | None = None, local: Local | None = None) -> tuple[Tensor, Tensor]:
        """``x`` [T, H] to ``topk_ids`` [T, k] int64 and ``topk_weights`` [T, k] float32.

        Ids are logical; with ``local``, on the fused path only, they are entries of its table, and padded rows hold −1.
        """
        if fused.suits(x):
            return gate_and_route(x, self.weight, self.topk, renormalize=self.norm_topk_prob, **_mapped(local, count))
        probs = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32)
        weights, ids = probs.topk(self.topk, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights

    def after_norm(
        self,
        x: Tensor | Slices,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        count: Tensor | None = None,
        local: Local | None = None,
    ) -> NormedRoute:
        """`forward` of the RMS norm of ``x`` + ``residual`` [T, H], with that norm and sum."""
        mapped = _mapped(local, count)
        return norm_gate_route(
            x, residual, norm_weight, eps, self.weight, self.topk, renormalize=self.norm_topk_prob, **mapped
        )


class Local(NamedTuple):
    """With what a router itself says where experts are: see `Dispatcher`."""

    table: Tensor
    """[C, E] local index of each copy, or −1."""
    num_copies: Tensor | None


def _mapped(local: Local | None, count: Tensor | None) -> dict[str, Tensor | None]:
    return {} if local is None else {"physical": local.table, "num_copies": local.num_copies, "count": count}


class Experts(nn.Module):
    """One rank's experts, SwiGLU each. No step depends on values on the host, so nothing here waits for the device.

    Where ``tp_size`` ranks share each expert, this is part ``tp_rank`` of its inner dimension.
    """

    arrivals: Tensor
    """[E_local] int32: the fused kernels' counters, 0 between calls."""

    def __init__(
        self, cfg: DecoderConfig, expert_ids: tuple[int, ...], *, tp_rank: int = 0, tp_size: int = 1, **factory: Any
    ) -> None:
        super().__init__()
        rows = Shard(dim=0, whole=cfg.moe_intermediate_size, rank=tp_rank, size=tp_size, blocks=2)
        width, inner = cfg.hidden_size, rows.num
        self.expert_ids = expert_ids
        """Logical ids of the experts held here, by local index."""
        self.gate_up_proj = nn.Parameter(torch.empty(len(expert_ids), 2 * inner, width, **factory))
        """[E_local, 2I, H]: gate above up."""
        self.down_proj = nn.Parameter(torch.empty(len(expert_ids), width, inner, **factory))
        """[E_local, H, I]."""
        zeros = torch.zeros(len(expert_ids), dtype=torch.int32, device=factory.get("device"))
        self.register_buffer("arrivals", zeros, persistent=False)
        if tp_size > 1:
            cut(self.gate_up_proj, rows)
            cut(self.down_proj, Shard(dim=1, whole=cfg.moe_intermediate_size, rank=tp_rank, size=tp_size))

    def forward(self, x: Tensor, local_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """``x`` [T, H], ``local_ids`` [T, k] (−1: not computed) to the weighted sum over k [T, H]; dropped rows give 0."""
        if not x.shape[0]:
            return torch.zeros_like(x)  # no row of this rank's experts, where rows travel
        if fused.suits(x):
            return experts(x, local_ids, topk_weights, self.gate_up_proj, self.down_proj, arrivals=self.arrivals)
        y = self._grouped(x, local_ids) if self._groups() else self._dense(x, local_ids)
        weighted = y.float() * topk_weights[..., None]
        # Selected, not multiplied: 0 · NaN is NaN, and dropped rows may hold anything.
        return torch.where((local_ids >= 0)[..., None], weighted, 0.0).sum(dim=1).to(x.dtype)

    def _groups(self) -> bool:
        """Whether the grouped matrix product takes these weights: strides of 16 bytes; on CUDA bfloat16 only, else it syncs."""
        w1, w2 = self.gate_up_proj, self.down_proj
        if any(size * w1.element_size() % 16 for size in (w1.shape[2], w2.shape[2])):
            return False
        return w1.device.type == "cpu" or (w1.dtype == torch.bfloat16 and _has_grouped_mm(w1.device))

    def _grouped(self, x: Tensor, local_ids: Tensor) -> Tensor:
        """[T, k, H] by one product a projection over rows sorted by expert; dropped rows sort last and are in no group."""
        num_rows, topk = local_ids.shape
        num_local = len(self.expert_ids)
        flat = torch.where(local_ids >= 0, local_ids, num_local).flatten()
        by_expert, order = flat.sort(stable=True)
        experts = torch.arange(num_local, device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        gate, up = F.grouped_mm(x[order // topk], self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows * topk, device=x.device))
        return y[places].view(num_rows, topk, -1)

    def _dense(self, x: Tensor, local_ids: Tensor) -> Tensor:
        """[T, k, H] where the grouped product cannot run: every local expert computes every row, the wanted ones are picked."""
        rows = x.expand(len(self.expert_ids), *x.shape)
        gate, up = torch.bmm(rows, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        y = torch.bmm(F.silu(gate) * up, self.down_proj.transpose(1, 2))
        return y[local_ids.clamp(min=0), torch.arange(x.shape[0], device=x.device)[:, None]]


@cache
def _has_grouped_mm(device: torch.device) -> bool:
    """Whether the GPU runs it as one kernel; older ones fall back to a loop that waits for the group ends."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


class MoE(nn.Module):
    """Router and experts behind a dispatcher. The batch's device scalar is read here, and only where the group says so."""

    def __init__(self, cfg: DecoderConfig, group: ExpertGroup, moe_layer: int = 0, **factory: Any) -> None:
        super().__init__()
        self.gate = Router(cfg, **factory)
        placement = group.placement(cfg.num_experts, moe_layer)
        mine = placement.experts_of(group.ep_rank)
        self.experts = Experts(cfg, mine, tp_rank=group.moe_tp_rank, tp_size=group.parallel.moe_tp, **factory)
        self.dispatcher = group.dispatcher(
            placement,
            topk=cfg.num_experts_per_tok,
            hidden_size=cfg.hidden_size,
            dtype=self.gate.weight.dtype,
            device=self.gate.weight.device,
        )
        self.reads_scalar, self.padding_policy = group.reads_scalar, group.padding_policy
        self.load: EpLoad | None = None
        self.load_layer = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's experts."""
        return self.experts.gate_up_proj.nbytes + self.experts.down_proj.nbytes

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """``x`` [T, H] to [T, H]; rows from `num_token_non_padded` on give 0 where the mask is compiled in."""
        if self._local is None or not fused.suits(x):
            topk_ids, topk_weights = self.gate(x)
            return self.compute(x, topk_ids, topk_weights, batch)
        with phase("ep::dispatch"):  # nothing has to be sent: the router's own kernel says where experts are
            local_ids, topk_weights = self.gate(x, count=self._count(batch), local=self._local)
        return self._experts(x, Dispatched(x=x, local_ids=local_ids, topk_weights=topk_weights))

    def behind_norm(
        self, x: Tensor | Slices, residual: Tensor, norm_weight: Tensor, eps: float, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """`forward` of the RMS norm of ``x`` + ``residual`` [T, H], and that sum; few rows on a GPU."""
        if self._local is None:
            r = self.gate.after_norm(x, residual, norm_weight, eps)
            return self.compute(r.normed, r.topk_ids, r.topk_weights, batch), r.total
        with phase("ep::dispatch"):
            r = self.gate.after_norm(x, residual, norm_weight, eps, count=self._count(batch), local=self._local)
        handle = Dispatched(x=r.normed, local_ids=r.topk_ids, topk_weights=r.topk_weights)
        return self._experts(r.normed, handle), r.total

    def compute(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, batch: ForwardBatch) -> Tensor:
        """`forward` behind the router."""
        count = self._count(batch)
        topk_ids, topk_weights = consume(self.padding_policy, topk_ids, topk_weights, count)
        return self._experts(x, self.dispatcher.dispatch(x, topk_ids, topk_weights, count))

    @property
    def _local(self) -> Local | None:
        """With what the router's kernel dispatches; None where rows travel."""
        table = getattr(self.dispatcher, "local_table", None)
        return None if table is None else Local(table, getattr(self.dispatcher, "num_copies", None))

    def _count(self, batch: ForwardBatch) -> Tensor | None:
        return batch.num_token_non_padded if self.reads_scalar else None

    def _experts(self, x: Tensor, handle: Dispatched) -> Tensor:
        if self.load is not None:
            self.load.add(self.load_layer, handle, x.shape[0])
        return self.dispatcher.combine(self.experts(handle.x, handle.local_ids, handle.topk_weights), handle)
