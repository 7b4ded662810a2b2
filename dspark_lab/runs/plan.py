"""From a list of configs to jobs: which arms share a process group, which share a code path, what is measured twice. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.config.choices import NEED_ALIKE, TAKE_BOTH
from dspark_lab.errors import LabError
from dspark_lab.runs.spec import Arm


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arms that are measured together, and the arms that are shown by another one's figures."""

    arms: tuple[Arm, ...]
    aliases: tuple[tuple[Arm, str], ...]
    """(arm, name of the arm whose code path it shares)."""


def expand(cfg: LabConfig, axes: dict[str, Any]) -> list[LabConfig]:
    """The product of ``axes`` over ``cfg``: ``{"ep_size": [1, 2], "alloc": ["none", "blocking"]}`` gives four configs.

    Combinations that a rule forbids raise; ``alloc`` values that an EP size forbids are named with the way out.
    """
    for name, values in axes.items():
        cfg.toggle(name)  # an unknown name is refused here
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise LabError(f"{name}={values!r} is not a list of values to sweep over; write {name}=[{values!r}].")
        if not values:
            raise LabError(f"{name}=[] leaves nothing to run; give at least one value.")
    names = list(axes)
    combos = [dict(zip(names, combo, strict=True)) for combo in itertools.product(*axes.values())]
    return list(dict.fromkeys(_in_parallel(cfg, toggles) for toggles in combos))


def _in_parallel(cfg: LabConfig, toggles: dict[str, Any]) -> LabConfig:
    """``cfg`` with ``toggles``; what a swept EP size or dispatcher leaves open follows from them.

    At EP1 nothing is dispatched or placed, so such combinations are one. Where the dispatcher is swept and ``attn_dp`` is not,
    each runs as it is meant to: ``all_reduce`` and ``symm_mem`` with all rows on every rank, the others with rows of their own.
    """
    ep = toggles.get("ep_size", cfg.parallel.ep_size)
    if ep == 1 and "ep_size" in toggles:
        alone = {"dispatcher": "all_reduce", "placement": "contiguous", "num_redundant_experts": 0, "attn_dp": 1}
        toggles = {**toggles, **alone}
    elif "dispatcher" in toggles and "attn_dp" not in toggles:
        alike = toggles["dispatcher"] in (*NEED_ALIKE, *TAKE_BOTH)
        toggles = {**toggles, "attn_dp": 1 if alike else ep}
    return cfg.replace(**toggles)


def path_key(cfg: LabConfig) -> LabConfig:
    """Configs with equal keys run the same code in every step: an `alloc` whose guard never builds is ``none``."""
    if not cfg.engine.speculate:
        return cfg.replace(alloc="on_demand")  # no drafts, no scalar of theirs
    if cfg.builds_scalar:
        return cfg.replace(transfer=cfg.engine.how.transfer, guard="always")
    return cfg.replace(alloc="none") if not cfg.needs_scalar else cfg


def arm_name(cfg: LabConfig) -> str:
    """``tiny-ep2-bs4-blocking``: readable, and legal as a folder name."""
    e, p = cfg.engine, cfg.parallel
    parts = [cfg.preset, f"ep{p.ep_size}"]
    if p.tp_size > 1:
        parts.append(f"tp{p.tp_size}")
    if p.attn_dp > 1:
        parts.append(f"dp{p.attn_dp}")
    if p.ep_size > 1:
        parts += [p.dispatcher.rpartition(":")[2]] * (p.dispatcher != "all_reduce")
        parts += [p.placement] * (p.placement != "contiguous")
        parts += [f"red{p.num_redundant_experts}"] * (p.num_redundant_experts > 0)
    parts.append(f"bs{e.batch_size}")
    parts += ["plain"] * (not e.speculate)
    if e.host_work_us:
        parts.append(f"hw{e.host_work_us:g}")
    parts.append(e.alloc.replace(":", "-"))
    if not e.mask_padding:
        parts.append("maskoff")
    return "-".join(parts)


def is_floor(cfg: LabConfig) -> bool:
    """The arm to compare with where the scalar is consumed: the mask compiled out, nothing built."""
    return not cfg.engine.mask_padding and cfg.engine.alloc == "none"


def pick_baseline(configs: Sequence[LabConfig]) -> LabConfig:
    """The floor arm where present, else ``alloc="none"``, else the first."""
    for wanted in (is_floor, lambda c: c.engine.alloc == "none"):
        for cfg in configs:
            if wanted(cfg):
                return cfg
    return configs[0]


def group(configs: Sequence[LabConfig], *, floor_pair: bool = True) -> list[Group]:
    """Groups by weights, world and device; within a group equal code paths run once, and the baseline runs twice (A/A)."""
    by_weights: dict[Any, list[LabConfig]] = {}
    for cfg in configs:
        by_weights.setdefault((cfg.model, cfg.parallel, cfg.seed, cfg.engine.device), []).append(cfg)
    names = _unique_names(configs)
    groups = []
    for members in by_weights.values():
        arms: dict[LabConfig, Arm] = {}
        aliases: list[tuple[Arm, str]] = []
        for cfg in sorted(members, key=lambda c: c.engine.alloc != "none"):
            arm, key = Arm(name=names[cfg], config=cfg), path_key(cfg)
            if key in arms:
                aliases.append((arm, arms[key].name))
            else:
                arms[key] = arm
        run = list(arms.values())
        if floor_pair:
            pairs = _baselines(run) or ([pick_baseline(members)] if len(run) > 1 else [])
            run += [Arm(name=f"{names[base]}.aa", config=base, role="aa") for base in pairs]
        groups.append(Group(arms=tuple(run), aliases=tuple(aliases)))
    return groups


def _baselines(arms: Sequence[Arm]) -> list[LabConfig]:
    """The baseline of each set of arms that differ in nothing but how the scalar comes to be; of sets of one, none."""
    sets: dict[LabConfig, list[LabConfig]] = {}
    for arm in arms:
        alike = arm.config.replace(alloc="on_demand", mask_padding=True)
        sets.setdefault(alike, []).append(arm.config)
    return [pick_baseline(members) for members in sets.values() if len(members) > 1]


def _unique_names(configs: Sequence[LabConfig]) -> dict[LabConfig, str]:
    names: dict[LabConfig, str] = {}
    for cfg in configs:
        base = name = arm_name(cfg)
        for k in itertools.count(2):
            if name not in names.values() or cfg in names:
                break
            name = f"{base}-{k}"
        names[cfg] = name
    return names
