"""Attention over the slotted cache against the reference and against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.attention import decode_attention, reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
NAN = float("nan")


def make(
    dtype: torch.dtype, limits: list[list[int]], h: int, h_kv: int, d: int, ctx: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows with ``limits`` [B][Q]; whatever no row may see, other slots included, is NaN."""
    b, q_rows = len(limits), len(limits[0])
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(b * q_rows, h, d, generator=g)
    k, v = (torch.randn(b + 2, ctx, h_kv, d, generator=g) for _ in range(2))
    slots = torch.randperm(b + 1, generator=g)[:b]  # never the last one, the dummy
    unseen = torch.ones(b + 2, ctx, dtype=torch.bool)
    for slot, rows in zip(slots.tolist(), limits, strict=True):
        unseen[slot, : max(rows)] = False
    k[unseen], v[unseen] = NAN, NAN
    return (
        q.to(DEVICE, dtype),
        k.to(DEVICE, dtype),
        v.to(DEVICE, dtype),
        slots.to(DEVICE),
        torch.tensor(limits).flatten().to(DEVICE),
    )


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}.get(
        dtype, {"rtol": 2e-2, "atol": 2e-2}
    )


CASES = [
    ([[1]], 4, 2, 16, 40),
    ([[1, 2, 3, 4, 5, 6]], 4, 2, 16, 70),
    ([[71, 72, 73, 74, 75], [1, 2, 3, 4, 5], [100, 100, 100, 100, 100]], 6, 2, 32, 100),
    ([[129, 129, 129], [64, 64, 64]], 2, 1, 64, 129),  # a block sees itself both ways
    ([[65, 66, 67, 68, 69, 70]], 16, 4, 128, 150),
    ([[40 + i for i in range(20)]], 8, 2, 16, 64),  # more rows than one tile holds
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("limits", "h", "h_kv", "d", "ctx"), CASES)
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_agrees_with_reference(
    dtype: torch.dtype, limits: list[list[int]], h: int, h_kv: int, d: int, ctx: int, num_splits: int | None
) -> None:
    inputs = make(dtype, limits, h, h_kv, d, ctx)
    got, want = decode_attention(*inputs, num_splits=num_splits), reference.decode_attention(*inputs)
    assert got.isfinite().all(), "stale places leaked"
    torch.testing.assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize("num_splits", [1, 2, 7, 16])
def test_agrees_with_torch(num_splits: int) -> None:
    """Gathered, masked and repeated for F.scaled_dot_product_attention, as the plain model does."""
    limits = [[90, 91, 92, 93, 94], [3, 4, 5, 6, 7], [33, 33, 33, 33, 33]]
    q, k, v, slots, key_limits = make(torch.float32, limits, 8, 2, 32, 96)
    got = decode_attention(q, k, v, slots, key_limits, num_splits=num_splits)
    # SDPA cannot stand the NaN either: 0 · NaN.
    gathered = [x[slots].nan_to_num().repeat_interleave(4, dim=2).transpose(1, 2) for x in (k, v)]
    mask = (torch.arange(96, device=DEVICE) < key_limits.view(3, 5, 1))[:, None]
    want = F.scaled_dot_product_attention(q.view(3, 5, 8, 32).transpose(1, 2), *gathered, attn_mask=mask)
    torch.testing.assert_close(got, want.transpose(1, 2).reshape(15, 256), rtol=1e-4, atol=1e-5)


def test_limits_decide_what_is_seen() -> None:
    """Widening one row's limit by one position changes that row and no other."""
    inputs = make(torch.float32, [[20, 21, 30]], 4, 2, 16, 64)
    before = decode_attention(*inputs, num_splits=2)
    wider = inputs[4].clone()
    wider[0] += 1
    changed = (decode_attention(*inputs[:4], wider, num_splits=2) != before).any(dim=1)
    assert changed.tolist() == [True, False, False]


def test_limits_of_none_and_beyond() -> None:
    q, k, v, slots, limits = make(torch.float32, [[40, 40], [5, 6]], 4, 2, 16, 40)
    limits = torch.tensor([10**6, 40, 0, 6], device=DEVICE)
    got = decode_attention(q, k, v, slots, limits, num_splits=2)
    torch.testing.assert_close(got, reference.decode_attention(q, k, v, slots, limits), rtol=1e-4, atol=1e-5)
    assert not got[2].any(), "a row that sees nothing gives zeros"


def test_strided_queries_and_caches() -> None:
    q, k, v, slots, limits = make(torch.float32, [[30, 31]], 4, 2, 16, 40)
    want = decode_attention(q, k, v, slots, limits)
    qkv = torch.cat((q, q), dim=1)[:, :4]
    both = torch.stack((k, v), dim=3)
    assert torch.equal(decode_attention(qkv, both[:, :, :, 0], both[:, :, :, 1], slots, limits), want)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, slots, limits = make(torch.float32, [[50, 51]], 4, 2, 16, 64)
    got = decode_attention(q * 100, k * 10, v, slots, limits, num_splits=3)
    torch.testing.assert_close(got, reference.decode_attention(q * 100, k * 10, v, slots, limits), rtol=1e-3, atol=1e-4)


def test_other_head_sizes_take_the_reference() -> None:
    inputs = make(torch.float32, [[7, 8]], 2, 1, 24, 16)
    assert torch.equal(decode_attention(*inputs), reference.decode_attention(*inputs))


def test_splits_fill_one_wave() -> None:
    from dspark_kernels.attention.kernel import MAX_SPLITS, choose_splits

    assert choose_splits(4, 18_432, 64, 132) == 33
    assert choose_splits(4, 2048, 64, 132) == 11  # of three blocks each at least
    assert choose_splits(4, 128, 64, 132) == 1
    assert choose_splits(1, 18_432, 64, 132) == MAX_SPLITS
    assert choose_splits(500, 18_432, 64, 132) == 1


def test_bad_shapes_are_named() -> None:
    q, k, v, slots, limits = make(torch.float32, [[7, 8]], 2, 1, 16, 16)
    with pytest.raises(ValueError, match="belong together"):
        decode_attention(q, k, v, slots, limits[:1])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_replays_in_a_graph_with_other_limits() -> None:
    q, k, v, slots, limits = make(torch.bfloat16, [[300, 301, 302], [20, 21, 22]], 8, 2, 128, 400)
    k, v = k.nan_to_num(), v.nan_to_num()
    decode_attention(q, k, v, slots, limits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, slots, limits)
    for shift in (0, -15, 50):
        moved = limits + shift
        keep = limits.clone()
        limits.copy_(moved)
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, slots, moved))
        limits.copy_(keep)


def test_slots_and_limits_may_be_views() -> None:
    q, k, v, slots, limits = make(torch.float32, [[30, 30], [7, 7]], 4, 2, 16, 40)
    want = decode_attention(q, k, v, slots, limits)
    every_second = torch.stack((slots, slots + 1), dim=1)[:, 0]
    one_a_request = limits.view(2, 2)[:, :1].expand(-1, 2)
    beside = torch.stack((one_a_request.flatten(), torch.full((4,), 3, device=DEVICE)), dim=1)[:, 0]
    assert torch.equal(decode_attention(q, k, v, every_second, beside), want)
