"""Fills the scalar that a captured graph reads: torch's own ``fill_``, and a kernel to measure it against."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.fill import reference


def fill_scalar(buffer: Tensor, n: int) -> None:
    """Sets the one element of ``buffer`` (1,) int32 to ``n``, in place, without a wait.

    Always ``buffer.fill_(n)``. The Triton kernel does the same work on the device and more on the host (its launcher is
    Python); `dspark_kernels.fill.bench` has the figures, and a faster kernel would have to win there first.
    """
    reference.fill_scalar(buffer, n)


__all__ = ["fill_scalar"]
