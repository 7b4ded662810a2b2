"""`fill_scalar` as a kernel of one element."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# Specialised on n, Triton would compile anew at 1 and at the first multiple of 16: in the middle of a run.
@triton.jit(do_not_specialize=["n"])
def _fill_scalar(buffer_ptr, n):
    tl.store(buffer_ptr, n.to(tl.int32))


def fill_scalar(buffer: Tensor, n: int) -> None:
    """As `reference.fill_scalar`."""
    _fill_scalar[(1,)](buffer, n, num_warps=1)
