"""Residual sum and norm against the reference."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.linear import sliced_linear
from dspark_kernels.norm import add_rms_norm, reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 100), (3, 2048)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_agrees_with_reference(dtype: torch.dtype, rows: int, width: int, with_residual: bool) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    got = add_rms_norm(x, residual if with_residual else None, weight, 1e-6)
    want = reference.add_rms_norm(x, residual if with_residual else None, weight, 1e-6)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0], want[0], rtol=ulp if dtype != torch.float32 else 1e-5, atol=1e-6)
    assert torch.equal(got[1], want[1]), "the new residual is an exact, rounded sum"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_slices_are_added_up(dtype: torch.dtype, with_residual: bool) -> None:
    torch.manual_seed(0)
    residual, weight = torch.randn(5, 96, device=DEVICE).to(dtype), torch.randn(96, device=DEVICE).to(dtype)
    x = sliced_linear(torch.randn(5, 600, device=DEVICE).to(dtype), torch.randn(96, 600, device=DEVICE).to(dtype))
    got = add_rms_norm(x, residual if with_residual else None, weight, 1e-6)
    want = reference.add_rms_norm(x.sum(), residual if with_residual else None, weight, 1e-6)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_norms_the_rounded_sum() -> None:
    """What is stored counts, not what was added: nearly every element equals torch's to the bit."""
    torch.manual_seed(1)
    x, residual = (torch.randn(2, 2000, device=DEVICE).half() for _ in range(2))
    weight = torch.ones(2000, device=DEVICE).half()
    got, want = (f(x, residual, weight, 1e-6)[0] for f in (add_rms_norm, reference.add_rms_norm))
    assert (got != want).float().mean() < 0.01


def test_strided_rows_and_no_rows() -> None:
    wide = torch.randn(4, 96, device=DEVICE)
    weight = torch.randn(32, device=DEVICE)
    got = add_rms_norm(wide[:, :32], wide[:, 32:64], weight, 1e-6)
    torch.testing.assert_close(got, reference.add_rms_norm(wide[:, :32], wide[:, 32:64], weight, 1e-6))
    assert add_rms_norm(wide[:0, :32], None, weight, 1e-6)[0].shape == (0, 32)


def test_without_residual_the_input_is_handed_on() -> None:
    x = torch.randn(2, 16, device=DEVICE)
    assert add_rms_norm(x, None, torch.ones(16, device=DEVICE), 1e-6)[1] is x


def test_bad_shapes_are_named() -> None:
    x = torch.randn(2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="do not belong together"):
        add_rms_norm(x, None, torch.ones(8, device=DEVICE), 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm(x.t(), None, torch.ones(2, device=DEVICE), 1e-6)
