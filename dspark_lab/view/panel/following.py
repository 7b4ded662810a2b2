"""What else changes with a toggle of a live run, as in `lab.sweep`: what an EP size or a dispatcher leaves open follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_lab.config.choices import NEED_ALIKE, TAKE_BOTH

ALONE: dict[str, Any] = {"dispatcher": "all_reduce", "placement": "contiguous", "attn_dp": 1}
"""At EP 1 nothing is dispatched, placed or shared out."""


def following(now: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The toggles beside ``name`` that change where it is turned to ``value`` and the rest is as ``now``.

    Requests that are sharded over all EP ranks stay so at another EP size; each dispatcher starts as it is meant to be used:
    all rows on every rank, or rows of its own on each.
    """
    if name == "ep_size":
        if value == 1:
            return dict(ALONE)
        return {"attn_dp": value} if now["attn_dp"] == now["ep_size"] > 1 else {}
    if name == "dispatcher":
        return {"attn_dp": 1 if value in (*NEED_ALIKE, *TAKE_BOTH) else now["ep_size"]}
    return {}
