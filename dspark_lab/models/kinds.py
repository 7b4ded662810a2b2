"""The kinds of drafters, and the one that a config names."""

from __future__ import annotations

import torch

from dspark_lab.config.parts import ModelConfig
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.models.lookup import LookupDrafter

AnyDrafter = Drafter | EagleDrafter | LookupDrafter
"""What the decode loop drafts with: ``new_cache``, ``write_context``, ``draft``."""


def make_drafter(
    cfg: ModelConfig,
    group: ExpertGroup | None = None,
    tp: RankGroup = ONE_RANK,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> AnyDrafter:
    """The drafter of ``cfg``, its weights not set."""
    kind = cfg.drafter.drafter_kind
    if kind == "lookup":
        return LookupDrafter(cfg, device=device)
    return (EagleDrafter if kind == "eagle3" else Drafter)(cfg, group, tp, device=device, dtype=dtype)
