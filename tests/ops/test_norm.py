"""Residual sum and norm against the reference."""

from __future__ import annotations

import pytest
import torch

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


def test_norms_the_rounded_sum() -> None:
    """A sum that float16 cannot hold counts as what is stored, not as what was added."""
    x = torch.full((1, 8), 2048.0, device=DEVICE, dtype=torch.float16)
    x[0, 0] = 1.0
    residual = torch.ones_like(x)  # 2049 is stored as 2048
    weight = torch.ones(8, device=DEVICE, dtype=torch.float16)
    normed, total = add_rms_norm(x, residual, weight, 0.0)
    assert total[0, 1] == 2048.0
    torch.testing.assert_close(normed, total / total.float().square().mean().sqrt().half(), rtol=1e-3, atol=0)


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
