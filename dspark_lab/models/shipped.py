"""`shipped`: the trained target with any of its drafters, as a config."""

from __future__ import annotations

from typing import Any

from dspark_lab.config.lab import LabConfig
from dspark_lab.config.presets import preset
from dspark_lab.config.shipped import DRAFTERS, PREFIX, TARGET
from dspark_lab.errors import unknown
from dspark_lab.models.checkpoint import load_pair


def shipped(drafter: str = DRAFTERS[0], **toggles: Any) -> LabConfig:
    """The preset ``shipped`` with another ``drafter`` of those that were trained for its target, and toggles changed.

    Raises `LabError` that names the drafters.
    """
    if not isinstance(drafter, str) or drafter not in DRAFTERS:
        raise unknown("drafter", drafter, DRAFTERS)
    base = preset("shipped")
    fixed = {"preset": base.preset, "dtype": base.model.dtype}
    engine = {name: getattr(base.engine, name) for name in ("batch_size", "text", "prompt_len", "max_new_tokens")}
    return load_pair(TARGET, f"{PREFIX}{drafter}", **(fixed | engine | toggles))
