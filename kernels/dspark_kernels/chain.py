"""Programmatic dependent launch: a kernel's programs are set up, and its weights start on their way, in its predecessor's tail.

A chained kernel calls `wait` before it touches anything that a kernel before it wrote. Waiting is for the completion of the
direct predecessor, which has waited for its own, so everything earlier is complete too. Before the wait it may read only what
no kernel of the stream writes: weights. See "Programmatic Dependent Launch" in the CUDA programming guide.
``DSPARK_CHAINED=0`` switches it off, for a timeline in which no two kernels of a stream overlap.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which takes CPU tensors and knows no chaining."""

ENABLED = os.environ.get("DSPARK_CHAINED", "1") != "0"


@lru_cache
def chains(device: torch.device) -> bool:
    """Whether kernels on ``device`` are launched chained: compute capability 9.0 and up."""
    return ENABLED and not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def options(chained: bool) -> dict[str, Any]:
    """The launch arguments that make a kernel with a ``CHAINED`` constant chained, or not."""
    return {"CHAINED": True, "launch_pdl": True} if chained else {"CHAINED": False}


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Lets the successor be set up, then waits until all that came before is complete."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
