"""`experts` against its reference: odd shapes, dropped rows, poison, skew."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dspark_kernels.experts import experts, kernel, reference
from dspark_kernels.experts.kernel import Product, Tiles, tiles_for

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# bfloat16 products are wrong in the interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TILES = Tiles(
    rows=16, up=Product(cols=16, depth=32, stages=2), down=Product(cols=16, depth=32, stages=2)
)  # fmt: skip


def make(
    rows: int, topk: int, num_experts: int, width: int, inner: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Random arguments of `experts`; each row's experts differ, as a router's do."""
    gen = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=DEVICE)

    picks = draw(rows, num_experts).argsort(dim=-1)[:, :topk]
    weights = draw(rows, topk).softmax(dim=-1)
    return {
        "x": draw(rows, width).to(dtype),
        "local_ids": picks,
        "topk_weights": weights,
        "gate_up": (draw(num_experts, 2 * inner, width) / math.sqrt(width)).to(dtype),
        "down": (draw(num_experts, width, inner) / math.sqrt(inner)).to(dtype),
    }


def assert_same(
    args: dict[str, Tensor],
    tiles: Tiles | None = None,
    residual: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    got = experts(**args, residual=residual, tiles=tiles, arrivals=arrivals)
    want = reference.experts(**args, residual=residual)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    error = (got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-6)
    assert error < TOLERANCE[got.dtype], f"relative error {error:.1e}"
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "topk", "num_experts", "width", "inner"),
    [
        (1, 1, 1, 16, 16),
        (1, 2, 8, 64, 32),
        (5, 3, 7, 48, 40),  # pairs lead; nothing is a multiple of a tile
        (6, 2, 64, 96, 24),  # far more experts than pairs
        (37, 2, 5, 33, 17),  # more pairs of an expert than a tile has rows; odd widths
    ],
)
def test_as_the_reference(rows: int, topk: int, num_experts: int, width: int, inner: int, dtype: torch.dtype) -> None:
    assert_same(make(rows, topk, num_experts, width, inner, dtype))


def test_many_pairs_take_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make(24, 3, 6, 32, 16)
    searched = assert_same(args, TILES)
    monkeypatch.setattr(kernel, "SEARCH_PAIRS", 0)
    monkeypatch.setattr(kernel, "LIST_BLOCK", 16)  # 72 pairs: several blocks, the last one not full
    assert torch.equal(assert_same(args, TILES), searched)


@pytest.mark.parametrize("search", [0, 10_000])
def test_dropped_rows_give_exactly_zero_and_poison_stays_out(monkeypatch: pytest.MonkeyPatch, search: int) -> None:
    monkeypatch.setattr(kernel, "SEARCH_PAIRS", search)
    args = make(9, 3, 5, 32, 16)
    clean = {name: tensor.clone() for name, tensor in args.items()}
    clean["local_ids"][6:] = -1
    clean["local_ids"][0, 1] = -1  # another rank's expert
    clean["local_ids"][clean["local_ids"] == 4] = -1
    poisoned = {name: tensor.clone() for name, tensor in clean.items()}
    poisoned["x"][6:] = float("nan")
    poisoned["local_ids"][7] = 1 << 40  # ids no table has
    poisoned["local_ids"][8] = -(1 << 40)
    poisoned["topk_weights"][clean["local_ids"] < 0] = float("nan")
    poisoned["gate_up"][4] = float("nan")  # an expert without rows
    poisoned["down"][4] = float("nan")
    got = experts(**poisoned, tiles=TILES)
    assert torch.equal(got, experts(**clean, tiles=TILES))
    assert torch.equal(got[6:], torch.zeros_like(got[6:]))
    assert got[:6].abs().sum() > 0
    assert_same(clean, TILES)


def test_all_dropped() -> None:
    args = make(4, 2, 3, 32, 16)
    args["local_ids"].fill_(-1)
    args["x"].fill_(float("nan"))
    assert torch.equal(experts(**args), torch.zeros_like(args["x"]))


@pytest.mark.parametrize("search", [0, 10_000])
@pytest.mark.parametrize("same_choice", [False, True])
def test_one_expert_gets_all(monkeypatch: pytest.MonkeyPatch, search: int, same_choice: bool) -> None:
    monkeypatch.setattr(kernel, "SEARCH_PAIRS", search)
    args = make(40, 2, 6, 32, 16)
    args["local_ids"][:, 0] = 3
    args["local_ids"][:, 1] = 3 if same_choice else -1
    assert_same(args, TILES)


def test_nan_of_a_real_row_stays_in_its_row() -> None:
    args = make(6, 2, 3, 32, 16)
    want = experts(**args)
    args["x"][2] = float("nan")
    got = experts(**args)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_joins_before_the_rounding(dtype: torch.dtype) -> None:
    args = make(5, 2, 4, 48, 16, dtype)
    args["local_ids"][3:] = -1
    residual = torch.randn_like(args["x"])
    assert torch.equal(assert_same(args, residual=residual)[3:], residual[3:])


@pytest.mark.parametrize("search", [0, 10_000])
def test_counters_are_zero_again(monkeypatch: pytest.MonkeyPatch, search: int) -> None:
    monkeypatch.setattr(kernel, "SEARCH_PAIRS", search)
    arrivals = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    for seed in range(2):
        assert_same(make(9, 3, 5, 32, 16, seed=seed), TILES, arrivals=arrivals)
        assert not arrivals.any()
    with pytest.raises(ValueError, match=r"must be \[5\] int32"):
        experts(**make(9, 3, 5, 32, 16), arrivals=arrivals[:3])


def test_strided_rows_and_ids() -> None:
    args = make(6, 2, 4, 32, 16)
    want = experts(**args)
    args["x"] = args["x"].T.contiguous().T
    args["local_ids"] = args["local_ids"].repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(experts(**args), want)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_every_tile_height(rows: int) -> None:
    cut = Product(cols=32, depth=32, stages=2)
    assert_same(make(50, 2, 3, 64, 48), Tiles(rows=rows, up=cut, down=cut))


def test_tiles_follow_the_rows_an_expert_gets() -> None:
    heights = [tiles_for(pairs, 64, torch.bfloat16).rows for pairs in (36, 288, 1152, 3072)]
    assert heights == [16, 16, 32, 64]


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("topk_weights", lambda t: t[:, :1], "topk_weights has the shape"),
        ("down", lambda t: t[..., :8], r"must be \[E, 2I, H\]"),
        ("down", lambda t: t.double(), "one dtype"),
        ("gate_up", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
        ("local_ids", lambda t: t[:2], r"\[T, H\] and \[T, k\]"),
    ],
)
def test_wrong_arguments_are_named(name, spoil, says) -> None:
    args = make(4, 2, 3, 32, 16)
    args[name] = spoil(args[name])
    with pytest.raises(ValueError, match=says):
        experts(**args)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("rows", [6, 16, 96])
def test_a_graph_follows_its_inputs(rows: int, chained: bool) -> None:
    """Captured once, replayed on other ids and rows: another number of experts is hit, the graph is the same."""
    args = make(rows, 4, 32, 256, 128, torch.bfloat16)
    tiles = replace(tiles_for(rows * 4, 32, torch.bfloat16), chained=chained)
    experts(**args, tiles=tiles)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(**args, tiles=tiles)
    for seed in range(1, 6):
        fresh = make(rows, 4, 32, 256, 128, torch.bfloat16, seed=seed)
        fresh["local_ids"][rows // 2 :] = -1 if seed % 2 else 3
        for name, tensor in fresh.items():
            args[name].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        want = reference.experts(**fresh)
        error = (out.float() - want.float()).norm() / want.float().norm()
        assert error < TOLERANCE[torch.bfloat16]
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("num_experts", "topk", "inner"), [(64, 6, 1024), (128, 8, 768)])
@pytest.mark.parametrize("rows", [1, 6, 192])
def test_published_shapes(rows: int, num_experts: int, topk: int, inner: int) -> None:
    args = make(rows, topk, num_experts, 2048, inner, torch.bfloat16)
    args["local_ids"][rows - rows // 4 :] = -1
    plain = assert_same(args)
    apart = replace(tiles_for(rows * topk, num_experts, torch.bfloat16), chained=False)
    assert torch.equal(assert_same(args, apart), plain)
