"""Which configs are measured together for the recordings that ship, and how: by part, a part by sheet. Pure values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dspark_lab.config import LabConfig, preset
from dspark_lab.errors import unknown

ALWAYS = ("none", "blocking", "non_blocking", "pinned:always", "persistent:always")
ON_DEMAND = ("on_demand", "pinned", "persistent")
HOST_WORK_US = (200.0, 400.0, 600.0, 800.0, 1000.0)
"""Beside 0, which is the sheet ``small``."""
GRAPH: dict[str, Any] = {"use_graph": True, "overlap": True, "device": "cuda"}


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Configs of one sweep, and how they are measured."""

    configs: tuple[LabConfig, ...]
    num_steps: int = 128
    repeats: int = 2
    processes: int = 3
    profile_steps: int = 8
    keep_traces: tuple[str, ...] = ()
    """Arms by `alloc` whose captures ship; of the others the step tables do."""
    traces_at: dict[str, Any] = field(default_factory=dict)
    """Toggles that a kept capture must have."""


def sheets(part: str) -> dict[str, Sheet]:
    """The sheets of ``part``: ``one`` (one GPU), ``two`` (two GPUs), ``ep4`` and ``ep8`` (EP 1 up to as many GPUs)."""
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    return PARTS[part]()


def _one() -> dict[str, Sheet]:
    small = preset("small", **GRAPH)
    qwen = preset("qwen3-30b-a3b", device="cuda")
    return {
        "small": Sheet(
            configs=tuple(small.replace(batch_size=b, alloc=a) for b in (1, 4, 8, 32) for a in (*ALWAYS, *ON_DEMAND)),
            repeats=1,
            keep_traces=("none", "blocking", "non_blocking"),
            traces_at={"batch_size": 1},
        ),
        "small-hostwork": Sheet(
            configs=tuple(small.replace(host_work_us=us, alloc=a) for us in HOST_WORK_US for a in ("none", "blocking")),
            repeats=1,
            processes=2,
            keep_traces=("none", "blocking"),
            traces_at={"host_work_us": 600.0},
        ),
        "small-eager": Sheet(
            configs=tuple(small.replace(use_graph=False, overlap=False, alloc=a) for a in ("none", "blocking")),
            num_steps=48,
            repeats=3,
            processes=1,
            profile_steps=4,
            keep_traces=("none",),
        ),
        "small-speculation": Sheet(
            configs=tuple(
                small.replace(batch_size=b, alloc="none", speculate=s) for b in (1, 8, 32) for s in (True, False)
            ),
            repeats=1,
            keep_traces=("none",),
            traces_at={"batch_size": 1, "speculate": False},
        ),
        "qwen3-30b-a3b-speculation": Sheet(
            configs=tuple(qwen.replace(alloc="none", speculate=s) for s in (True, False)), repeats=1, profile_steps=0
        ),
        "qwen3-30b-a3b": Sheet(
            configs=tuple(
                qwen.replace(batch_size=b, alloc=a) for b in (1, 8) for a in ("none", "blocking", "on_demand")
            ),
            repeats=1,
            processes=2,
            keep_traces=("none", "blocking"),
            traces_at={"batch_size": 1},
        ),
    }


def _two() -> dict[str, Sheet]:
    tp2 = preset("small", tp_size=2, **GRAPH)
    ep2 = preset("small", ep_size=2, **GRAPH)
    floor = ep2.replace(alloc="none", mask_padding=False)
    seed_arms = ("none", "blocking", "non_blocking", "on_demand")
    return {
        "tp2": Sheet(
            configs=tuple(tp2.replace(alloc=a) for a in seed_arms),
            profile_steps=128,
            keep_traces=("none", "blocking", "non_blocking"),
        ),
        "seed": Sheet(
            configs=tuple(preset("seed", device="cuda").replace(alloc=a) for a in seed_arms),
            repeats=1,
            profile_steps=32,
            keep_traces=("none", "blocking", "non_blocking"),
        ),
        "ep2": Sheet(
            configs=(floor, *(ep2.replace(alloc=a) for a in ("blocking", "non_blocking", "persistent", "graph_slot"))),
            keep_traces=("none", "blocking", "persistent", "graph_slot"),
        ),
        "ep2-dispatch": Sheet(
            configs=tuple(
                ep2.replace(batch_size=b, alloc="graph_slot", dispatcher=name, attn_dp=dp)
                for b in (8, 32)
                for name, dp in (
                    ("all_reduce", 1),
                    ("symm_mem", 1),
                    ("symm_mem", 2),
                    ("all_gather", 2),
                    ("all_to_all", 2),
                )
            ),
            num_steps=96,
            repeats=3,
            processes=1,
            keep_traces=("graph_slot",),
            traces_at={"batch_size": 8, "attn_dp": 2},
        ),
    }


def _up_to(ranks: int) -> dict[str, Sheet]:
    """Strategies at every EP size up to ``ranks``, and every dispatcher and placement of those above 1."""
    made = {}
    for name in ("small", "qwen3-30b-a3b"):
        cfg = preset(name, **GRAPH)
        sizes = [n for n in (1, 2, 4, 8) if n <= ranks]
        cells = [cfg.replace(ep_size=n, batch_size=b, alloc="on_demand") for n, b in product(sizes, (1, 8, 32))]
        strategies = [arm for cell in cells for arm in _strategies(cell)]
        apart = [arm for cell in cells if cell.parallel.ep_size > 1 for arm in _dispatchers(cell)]
        kept: dict[str, Any] = {"traces_at": {"batch_size": 1, "ep_size": ranks}, "keep_traces": ("none", "blocking", "graph_slot")}  # fmt: skip
        made[f"ep{ranks}-{name}"] = Sheet(configs=tuple(strategies), repeats=3, processes=1, **kept)
        made[f"ep{ranks}-{name}-dispatch"] = Sheet(configs=tuple(apart), repeats=3, processes=1)
    return made


def _strategies(cell: LabConfig) -> list[LabConfig]:
    if cell.parallel.ep_size == 1:
        return [cell.replace(alloc=a) for a in ("none", "blocking", "on_demand")]
    floor = cell.replace(alloc="none", mask_padding=False)
    return [floor, *(cell.replace(alloc=a) for a in ("blocking", "on_demand", "graph_slot"))]


def _dispatchers(cell: LabConfig) -> list[LabConfig]:
    """Every way of travelling but ``all_reduce`` with contiguous experts, which the other sheet has."""
    ep = cell.parallel.ep_size
    ways = [("all_reduce", 1), ("symm_mem", 1), ("symm_mem", ep), ("all_gather", ep), ("all_to_all", ep)]
    arms = [
        cell.replace(alloc="graph_slot", dispatcher=name, attn_dp=dp, placement=placement)
        for (name, dp), placement in product(ways, ("contiguous", "balanced"))
    ]
    return arms[1:]


def rehearsed(sheet: Sheet) -> Sheet:
    """``sheet`` with the preset ``tiny`` on a CPU, a few steps each: shows that it runs, and measures nothing of interest."""
    kept = ("ep_size", "tp_size", "attn_dp", "dispatcher", "placement", "mask_padding", "alloc", "speculate")
    configs = []
    for cfg in sheet.configs:
        toggles = {name: cfg.toggle(name) for name in kept}
        if toggles["alloc"] == "graph_slot":
            toggles["alloc"] = "persistent"  # without a graph there is no slot
        configs.append(preset("tiny", device="cpu", batch_size=min(cfg.engine.batch_size, 4), **toggles))
    return replace(
        sheet,
        configs=tuple(dict.fromkeys(configs)),
        num_steps=4,
        repeats=1,
        processes=1,
        profile_steps=0,
        keep_traces=(),
    )


PARTS: dict[str, Callable[[], dict[str, Sheet]]] = {
    "one": _one,
    "two": _two,
    "ep4": partial(_up_to, 4),
    "ep8": partial(_up_to, 8),
}
