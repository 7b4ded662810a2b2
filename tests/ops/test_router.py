"""`route` and `gate_and_route` against their reference: ties, padding, the map before the mask, poison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dspark_kernels.linear import Slices, sliced_linear
from dspark_kernels.router import gate_and_route, kernel, norm_gate_route, reference, route

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DOT_DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
SHAPES = [(1, 1, 1), (1, 8, 2), (6, 64, 6), (5, 128, 8), (37, 60, 4), (3, 256, 8), (4, 7, 7)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scalar(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    ids, weights = got
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert torch.equal(ids, want[0])
    torch.testing.assert_close(weights, want[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("rows", "num_experts", "k"), SHAPES)
def test_as_the_reference(rows: int, num_experts: int, k: int, renormalize: bool, dtype: torch.dtype) -> None:
    logits = (3 * draw(rows, num_experts)).to(dtype)  # in bfloat16 many are equal
    assert_same(route(logits, k, renormalize=renormalize), reference.route(logits, k, renormalize=renormalize))


def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "route", lambda *args, **kwargs: "kernel")
    assert route(draw(2, 4), 1, renormalize=True) == "kernel"


def test_agrees_with_topk_where_nothing_ties() -> None:
    logits = draw(20, 64)
    ids, weights = route(logits, 6, renormalize=True)
    want, want_ids = logits.softmax(-1).topk(6)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want / want.sum(-1, keepdim=True))


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.zeros(2, 12, device=DEVICE)
    logits[1, [3, 9]] = 2.0
    ids, weights = route(logits, 4, renormalize=True)
    assert ids.tolist() == [[0, 1, 2, 3], [3, 9, 0, 1]]
    torch.testing.assert_close(weights[0], torch.full((4,), 0.25, device=DEVICE))


@pytest.mark.parametrize("count", [0, 3, 5, 9])
def test_padded_rows_are_masked_after_the_map(count: int) -> None:
    logits = draw(5, 8)
    physical = (torch.arange(8).flip(0) + 10).to(DEVICE)
    logits[count:] = float("nan")
    got = route(logits, 3, renormalize=True, count=scalar(count), physical=physical)
    assert_same(got, reference.route(logits, 3, renormalize=True, count=scalar(count), physical=physical))
    assert (got[0][count:] == -1).all()
    assert (got[1][count:] == 0).all()
    assert (got[0][:count] >= 10).all()


def test_a_row_of_nan_without_a_mask_stays_within_the_table() -> None:
    logits = draw(2, 6)
    logits[1, 2] = float("nan")
    physical = torch.tensor([4, 2, 0, 1, 3, 5], device=DEVICE)
    ids, weights = route(logits, 3, renormalize=False, physical=physical)
    assert ids[1].tolist() == [4, 2, 0]
    assert weights[1].isnan().all()
    assert not weights[0].isnan().any()


def test_infinite_logits_of_some_experts() -> None:
    logits = draw(3, 8)
    logits[:, :6] = float("-inf")
    got = route(logits, 4, renormalize=True)
    assert_same(got, reference.route(logits, 4, renormalize=True))
    assert len(set(got[0][0].tolist())) == 4


@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "num_experts", "k", "width"), [(1, 8, 2, 16), (6, 64, 6, 256), (19, 40, 8, 200)])
def test_gate_and_route(rows: int, num_experts: int, k: int, width: int, dtype: torch.dtype) -> None:
    x, gate = draw(rows, width).to(dtype), (draw(num_experts, width, seed=1) / width**0.5).to(dtype)
    count, physical = scalar(rows - rows // 3), torch.randperm(num_experts).to(DEVICE)
    got = gate_and_route(x, gate, k, renormalize=True, count=count, physical=physical)
    assert_same(got, reference.gate_and_route(x, gate, k, renormalize=True, count=count, physical=physical))


@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(("rows", "num_experts", "k", "width"), [(1, 8, 2, 16), (6, 64, 6, 256), (19, 40, 8, 200)])
def test_norm_gate_route(rows: int, num_experts: int, k: int, width: int, sliced: bool, dtype: torch.dtype) -> None:
    x, residual = draw(rows, width).to(dtype), (3 * draw(rows, width, seed=2)).to(dtype)
    norm, gate = (1 + draw(width, seed=3)).to(dtype), (4 * draw(num_experts, width, seed=1) / width**0.5).to(dtype)
    if sliced:
        x = sliced_linear(x, draw(width, width, seed=4).to(dtype))
    args = (x, residual, norm, 1e-5, gate, k)
    kwargs = {
        "renormalize": True,
        "count": scalar(rows - rows // 3),
        "physical": torch.randperm(num_experts).to(DEVICE),
    }
    got = norm_gate_route(*args, **kwargs)
    want = reference.norm_gate_route(x.sum() if isinstance(x, Slices) else x, *args[1:], **kwargs)
    assert torch.equal(got.total, want.total)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(got.normed, want.normed, rtol=ulp if dtype != torch.float32 else 1e-5, atol=1e-6)
    loose = 1e-5 if dtype == torch.float32 else 30 * ulp  # rows are rounded at another place
    torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=loose, atol=loose)
    assert (got.topk_ids == want.topk_ids).float().mean() > (0.999 if dtype == torch.float32 else 0.9)


def test_poisoned_rows_do_not_reach_others() -> None:
    x, gate = draw(6, 64), draw(8, 64, seed=1)
    want = gate_and_route(x, gate, 2, renormalize=True, count=scalar(4))
    x[4:] = float("nan")
    got = gate_and_route(x, gate, 2, renormalize=True, count=scalar(4))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("k", "kwargs", "says"),
    [
        (9, {}, "k=9 is not within 1 to 8"),
        (0, {}, "k=0"),
        (2, {"physical": torch.arange(7)}, r"physical must have the shape \(8,\)"),
        (2, {"count": torch.zeros(2, dtype=torch.int32)}, "count must hold one element"),
    ],
)
def test_wrong_arguments_are_named(k: int, kwargs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        route(draw(2, 8), k, renormalize=True, **kwargs)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_graph_reads_the_count_at_replay() -> None:
    logits, count = draw(8, 64), scalar(8)
    route(logits, 6, renormalize=True, count=count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = route(logits, 6, renormalize=True, count=count)
    for real in (3, 8, 0):
        count.fill_(real)
        logits.copy_(draw(8, 64, seed=real))
        graph.replay()
        assert torch.equal(ids, reference.route(logits, 6, renormalize=True, count=count)[0])
