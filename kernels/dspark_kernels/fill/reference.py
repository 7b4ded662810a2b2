"""`fill_scalar` in plain torch."""

from __future__ import annotations

from torch import Tensor


def fill_scalar(buffer: Tensor, n: int) -> None:
    """Sets the one element of ``buffer`` (1,) int32 to ``n``, in place."""
    buffer.fill_(n)
