"""Both ways to fill the scalar."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.fill import fill_scalar

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("n", [0, 1, 7, 16, 2**31 - 1])
def test_fills_in_place(n: int) -> None:
    from dspark_kernels.fill import kernel

    for fill in (fill_scalar, kernel.fill_scalar):
        pair = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
        fill(pair[:1], n)
        assert pair.tolist() == [n, -1]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_compiles_once() -> None:
    """A second variant for n = 1 or n = 16 would be compiled in the middle of a run."""
    from dspark_kernels.fill import kernel

    buffer = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernel.fill_scalar(buffer, 7)
    before = sum(len(c[0]) for c in kernel._fill_scalar.device_caches.values())
    for n in (1, 16, 0, 33):
        kernel.fill_scalar(buffer, n)
        assert buffer.item() == n
    assert sum(len(c[0]) for c in kernel._fill_scalar.device_caches.values()) == before
