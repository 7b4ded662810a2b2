"""Which tensors the ops hand to their Triton kernels; all others go to plain torch."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def interpret(on: bool) -> None:
    """Whether CPU tensors go to the kernels too, in Triton's interpreter. By default where TRITON_INTERPRET=1.

    That variable must stand when the kernels' modules are first imported: Triton reads it there.
    """
    global _interpreted
    _interpreted = on


def on_triton(x: Tensor, *, products: bool = False) -> bool:
    """On CUDA, where Triton is there; under its interpreter too, but not bfloat16 in ``products``, which are wrong there."""
    if not _has_triton() or not x.numel():
        return False
    return x.is_cuda or (_interpreted and not (products and x.dtype == torch.bfloat16))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
