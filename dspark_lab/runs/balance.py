"""The load that ``placement="balanced"`` spreads: counted over the first steps of the workload itself, or made."""

from __future__ import annotations

import torch

from dspark_lab.config import DecoderConfig, LabConfig
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.ep.groups import ParallelGroups
from dspark_lab.models.weights import build
from dspark_lab.plan.load import Loads, made_load
from dspark_lab.runs.measure import counted_block

STEPS = 16
"""Of the workload, which count the load: the same that count it again under the placement they led to."""


def loads_for(cfg: LabConfig, device: torch.device, groups: ParallelGroups) -> dict[str, Loads] | None:
    """Rows of each expert in each MoE layer of ``target`` and ``drafter``, the same on all ranks; None where nothing needs them."""
    p = cfg.parallel
    if p.placement != "balanced" or p.ep_size == 1:
        return None
    if p.expert_load != "own":
        models = {"target": cfg.model.target, "drafter": cfg.model.draft}
        return {who: _made(p.expert_load, c) for who, c in models.items() if c.num_moe_layers}
    return _own(cfg, device, groups)


def _made(name: str, c: DecoderConfig) -> Loads:
    return made_load(name, c.num_moe_layers, c.num_experts, c.num_experts_per_tok).tolist()


def _own(cfg: LabConfig, device: torch.device, groups: ParallelGroups) -> dict[str, Loads]:
    """Counted with experts laid out contiguously and without graphs; those weights are given back."""
    plain = cfg.replace(placement="contiguous", num_redundant_experts=_filling(cfg), use_graph=False, alloc="on_demand")
    engine = DecodeEngine(plain, *build(plain, device, groups), device, groups=groups)
    counted = counted_block(engine, num_steps=STEPS, on_step=lambda _: None)
    mine = {who: (counted[who]["experts"], counted[who]["rows"]) for who in ("target", "drafter") if who in counted}
    everyone = [mine] if groups.control is None else groups.control.objects(mine)
    models = {"target": cfg.model.target, "drafter": cfg.model.draft}
    return {who: _added_up([part[who] for part in everyone], models[who].num_experts) for who in mine}


def _filling(cfg: LabConfig) -> int:
    """Redundant experts that a contiguous layout needs at least, where the experts alone do not divide."""
    p = cfg.parallel
    sizes = [c.num_experts for c in (cfg.model.target, cfg.model.draft) if c.num_experts]
    return 0 if all(n % p.ep_size == 0 for n in sizes) else p.num_redundant_experts


def _added_up(parts: list[tuple[list[list[int]], list[list[int]]]], num_experts: int) -> Loads:
    """[layers][num_experts] of every rank's (logical ids, rows) [layers][local]."""
    loads = [[0.0] * num_experts for _ in parts[0][0]]
    for experts, rows in parts:
        for load, ids, counts in zip(loads, experts, rows, strict=True):
            for e, n in zip(ids, counts, strict=True):
                load[e] += n
    return loads
