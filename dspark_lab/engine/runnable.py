"""What a config may say and cannot be run: by this version, on the memory that is free, or with the room its experts have."""

from __future__ import annotations

import torch

from dspark_lab.config import LabConfig
from dspark_lab.device import free_bytes
from dspark_lab.ep.control import Control
from dspark_lab.errors import LabError
from dspark_lab.plan.memory import plan_memory
from dspark_lab.plan.padding import usable_buckets


def check_runnable(cfg: LabConfig) -> None:
    """Raises `LabError` for what a config may say (a recording may have it) and this version does not run live."""
    p = cfg.parallel
    if p.moe_dp > 1:
        raise LabError(
            f"moe_dp={p.moe_dp} is not run live by this version; it can be looked at in recordings. Set it back to run here."
        )
    apart = p.attn_dp > 1 or (p.ep_size > 1 and p.dispatcher != "all_reduce")
    if apart and p.world_size != p.ep_size:
        what = f"attn_dp={p.attn_dp}" if p.attn_dp > 1 else f"dispatcher={p.dispatcher!r}"
        raise LabError(
            f"{what} wants every expert whole on one rank, and here {p.world_size} ranks have ep_size={p.ep_size}; "
            f"choose ep_size={p.world_size}, or attn_dp=1 and dispatcher='all_reduce'."
        )
    if p.attn_dp > 1 and p.dispatcher == "all_reduce":
        raise LabError(
            f"dispatcher='all_reduce' wants all rows on every rank, and attn_dp={p.attn_dp} gives each its own; "
            "choose dispatcher='all_gather', 'all_to_all' or 'symm_mem', or attn_dp=1."
        )
    usable_buckets(cfg.engine.buckets, p)


def check_device(cfg: LabConfig, device: torch.device, control: Control | None) -> None:
    """Raises `LabError` for graphs without a GPU, and on all ranks alike for what does not fit on the fullest one.

    ``control``: the ranks', None where there is one; with several this is a collective call.
    """
    if cfg.engine.use_graph and device.type != "cuda":
        raise LabError(
            f"use_graph=True needs a GPU and the device is {device}; choose use_graph=False, or look at a recording."
        )
    plan, free = plan_memory(cfg), free_bytes(device)
    if control is not None:
        free = min(free for (free,) in control.gather([free], "the check of free memory"))
    need = plan.cache_bytes + plan.logits_bytes
    if need > free:
        raise LabError(
            f"batch_size={cfg.engine.batch_size} with context_len={cfg.model.context_len} needs {need / 2**30:.1f} GiB "
            f"for KV caches and activations and {free / 2**30:.1f} GiB are free on {device}; lower either of them."
        )


def no_room(num_rows: int, index: int, cfg: LabConfig) -> LabError:
    """The error of round ``index``, in which ``num_rows`` rows did not fit on the rank of their experts."""
    p = cfg.parallel
    return LabError(
        f"dispatcher={p.dispatcher!r}: {num_rows} rows found no room on their experts' rank by round {index} with "
        f"capacity_factor={p.capacity_factor}, so their outputs are wrong; raise it (1 always suffices), or spread the load: "
        "placement='balanced'."
    )
