"""Norm, rotary turn and cache write against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels.linear import sliced_linear
from dspark_kernels.qkv import k_norm_rope_write, qk_norm_rope_write, reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
EPS = 1e-6


def make(dtype: torch.dtype, rows: int, h: int, h_kv: int, d: int, ctx: int = 300) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows * 100 + d)
    return {
        "qkv": torch.randn(rows, (h + 2 * h_kv) * d, generator=g).to(DEVICE, dtype),
        "q_weight": torch.randn(d, generator=g).to(DEVICE, dtype),
        "k_weight": torch.randn(d, generator=g).to(DEVICE, dtype),
        "positions": torch.randperm(ctx, generator=g)[:rows].to(DEVICE),
        "inv_freq": (1.0 / 1e6 ** (torch.arange(0, d, 2).float() / d)).to(DEVICE),
        "slots": torch.randint(0, 3, (rows,), generator=g).to(DEVICE),
        "k_cache": torch.full((3, ctx, h_kv, d), float("nan"), device=DEVICE, dtype=dtype),
        "v_cache": torch.full((3, ctx, h_kv, d), float("nan"), device=DEVICE, dtype=dtype),
    }


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Both round at the same points: a few last places of the largest values."""
    return (
        {"rtol": 2 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
        if dtype != torch.float32
        else {"rtol": 1e-4, "atol": 1e-5}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "h", "h_kv", "d"), [(1, 4, 2, 16), (5, 16, 4, 128), (3, 3, 1, 24), (4, 2, 2, 64)])
def test_agrees_with_reference(dtype: torch.dtype, rows: int, h: int, h_kv: int, d: int) -> None:
    a, b = make(dtype, rows, h, h_kv, d), make(dtype, rows, h, h_kv, d)
    got, want = qk_norm_rope_write(**a, eps=EPS), reference.qk_norm_rope_write(**b, eps=EPS)
    torch.testing.assert_close(got, want, **tolerance(dtype))
    torch.testing.assert_close(a["k_cache"], b["k_cache"], **tolerance(dtype), equal_nan=True)
    torch.testing.assert_close(a["v_cache"], b["v_cache"], rtol=0, atol=0, equal_nan=True)
    written = ~a["v_cache"].isnan().any(dim=3).any(dim=2)
    assert int(written.sum()) == rows, "every row is written once and nothing else is"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_in_slices_is_added_up_and_scaled(dtype: torch.dtype) -> None:
    a, b = make(dtype, 5, 4, 2, 16), make(dtype, 5, 4, 2, 16)
    x, norm = 3 * torch.randn(5, 300, device=DEVICE).to(dtype), torch.randn(300, device=DEVICE).to(dtype)
    weight = (torch.randn(8 * 16, 300, device=DEVICE) / 300**0.5).to(dtype)
    product = sliced_linear(x, weight, residual=x.clone(), norm_weight=norm, eps=EPS)
    got = qk_norm_rope_write(**a | {"qkv": product}, eps=EPS)
    want = reference.qk_norm_rope_write(**b | {"qkv": product.sum()}, eps=EPS)
    close = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(got, want, **close if dtype != torch.float32 else tolerance(dtype))
    for cache in ("k_cache", "v_cache"):
        torch.testing.assert_close(
            a[cache], b[cache], **close if dtype != torch.float32 else tolerance(dtype), equal_nan=True
        )


def test_one_slot_for_all_rows_may_be_expanded() -> None:
    a, b = make(torch.float32, 5, 4, 2, 16), make(torch.float32, 5, 4, 2, 16)
    memory = torch.tensor([1, 2, 0, 2, 0, 2], device=DEVICE)  # what lies behind the one element
    a["slots"], b["slots"] = memory[:1].expand(5), memory[:1].repeat(5)
    a["positions"] = torch.stack([a["positions"], a["positions"] + 1], dim=1)[:, 0]  # every second element
    qk_norm_rope_write(**a, eps=EPS)
    reference.qk_norm_rope_write(**b, eps=EPS)
    torch.testing.assert_close(a["k_cache"], b["k_cache"], **tolerance(torch.float32), equal_nan=True)
    torch.testing.assert_close(a["v_cache"], b["v_cache"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_context_rows_as_a_slice(dtype: torch.dtype) -> None:
    a, b = make(dtype, 4, 4, 2, 32), make(dtype, 4, 4, 2, 32)
    for case, op in ((a, k_norm_rope_write), (b, reference.k_norm_rope_write)):
        case.pop("q_weight")
        op(case.pop("qkv")[:, 4 * 32 :], **case, eps=EPS)
    torch.testing.assert_close(a["k_cache"], b["k_cache"], **tolerance(dtype), equal_nan=True)
    torch.testing.assert_close(a["v_cache"], b["v_cache"], rtol=0, atol=0, equal_nan=True)


def test_one_layer_of_a_larger_cache() -> None:
    a, b = make(torch.float32, 3, 2, 1, 16), make(torch.float32, 3, 2, 1, 16)
    layers = [torch.zeros(2, 3, 300, 1, 16, device=DEVICE) for _ in range(2)]
    a |= {"k_cache": layers[0][1], "v_cache": layers[1][1]}
    b |= {"k_cache": torch.zeros_like(layers[0][1]), "v_cache": torch.zeros_like(layers[0][1])}
    qk_norm_rope_write(**a, eps=EPS)
    reference.qk_norm_rope_write(**b, eps=EPS)
    torch.testing.assert_close(layers[0][1], b["k_cache"], rtol=1e-4, atol=1e-5)
    assert not layers[0][0].any()
    assert not layers[1][0].any()


def test_far_positions() -> None:
    """Angles of many turns: cosine and sine must not be approximations."""
    a, b = make(torch.float32, 2, 2, 1, 64, ctx=20_000), make(torch.float32, 2, 2, 1, 64, ctx=20_000)
    for case in (a, b):
        case["positions"] = torch.tensor([19_999, 16_384], device=DEVICE)
    got, want = qk_norm_rope_write(**a, eps=EPS), reference.qk_norm_rope_write(**b, eps=EPS)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_places_outside_the_cache_are_dropped() -> None:
    case = make(torch.float32, 3, 2, 1, 16)
    case["positions"] = torch.tensor([1, 300, -1], device=DEVICE)
    case["slots"] = torch.tensor([10**9, 0, 1], device=DEVICE)
    q = qk_norm_rope_write(**case, eps=EPS)
    assert q.isfinite().all()
    assert case["k_cache"].isnan().all()
    assert case["v_cache"].isnan().all()


def test_bad_shapes_are_named() -> None:
    case = make(torch.float32, 2, 2, 1, 16)
    with pytest.raises(ValueError, match="whole heads"):
        qk_norm_rope_write(**(case | {"qkv": case["qkv"][:, :40]}), eps=EPS)
    with pytest.raises(ValueError, match="a value a row"):
        qk_norm_rope_write(**(case | {"slots": case["slots"][:1]}), eps=EPS)
    with pytest.raises(ValueError, match="share dtype"):
        qk_norm_rope_write(**(case | {"v_cache": case["v_cache"].half()}), eps=EPS)
