"""`sliced_linear` against its reference: odd shapes, strides, poison, graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from dspark_kernels.linear import Slices, kernel, reference, sliced_linear
from dspark_kernels.norm import add_rms_norm

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(1, 16, 16), (6, 48, 96), (5, 7, 33), (17, 40, 520), (31, 100, 64)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def both(x: Tensor, weight: Tensor, **norm) -> tuple[Slices, Slices]:
    """The op and its reference, compared by what their slices add up to."""
    got, want = sliced_linear(x, weight, **norm), reference.sliced_linear(x, weight, **norm)
    close(got.sum(), want.sum())
    assert torch.equal(got.total, want.total), "the sum is exact, then rounded"
    return got, want


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.1e}"


def make(rows: int, cols: int, depth: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual = draw(rows, depth, seed=seed), 3 * draw(rows, depth, seed=seed + 1)
    norm, weight = draw(depth, seed=seed + 2), draw(cols, depth, seed=seed + 3) / depth**0.5
    return x.to(dtype), residual.to(dtype), norm.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols", "depth"), SHAPES)
def test_product(rows: int, cols: int, depth: int, dtype: torch.dtype) -> None:
    x, _, _, weight = make(rows, cols, depth, dtype)
    got, _ = both(x, weight)
    assert got.squares is None
    close(got.sum(), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "cols", "depth"), SHAPES)
def test_behind_a_norm(rows: int, cols: int, depth: int, add: bool, dtype: torch.dtype) -> None:
    x, residual, norm, weight = make(rows, cols, depth, dtype)
    got, want = both(x, weight, residual=residual if add else None, norm_weight=norm, eps=1e-6)
    assert got.squares is not None
    assert want.squares is not None
    torch.testing.assert_close(got.squares.sum(0), want.squares.sum(0))
    close(got.sum(), F.linear(F.rms_norm(got.total, (depth,), norm, 1e-6), weight))


def test_a_slice_a_part_of_the_sum() -> None:
    x, _, _, weight = make(3, 16, 200, torch.float32)
    parts = sliced_linear(x, weight).parts
    assert parts.shape == (4, 3, 16), "slices of 64"
    torch.testing.assert_close(parts[3], x[:, 192:] @ weight[:, 192:].T)


def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "sliced_linear", lambda *args, **kwargs: "kernel")
    assert sliced_linear(draw(3, 16), draw(16, 16)) == "kernel"


def test_strided_rows() -> None:
    x, residual, norm, weight = make(4, 32, 64, torch.float32)
    wide = torch.cat([x, residual], dim=1)
    got = sliced_linear(wide[:, :64], weight, residual=wide[:, 64:], norm_weight=norm, eps=1e-6)
    want = sliced_linear(x, weight, residual=residual, norm_weight=norm, eps=1e-6)
    assert torch.equal(got.parts, want.parts)


def test_poison_stays_in_its_row() -> None:
    x, residual, norm, weight = make(6, 32, 64, torch.float32)
    want = sliced_linear(x, weight, residual=residual, norm_weight=norm).sum()
    x[4] = float("nan")
    got = sliced_linear(x, weight, residual=residual, norm_weight=norm).sum()
    assert got[4].isnan().all()
    rest = [0, 1, 2, 3, 5]
    assert torch.equal(got[rest], want[rest])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (lambda x, r, n, w: (x[:, :8], r, n, w), r"must be \[T, K\] and \[N, K\]"),
        (lambda x, r, n, w: (x.double(), r, n, w), "one dtype"),
        (lambda x, r, n, w: (x, r[:2], n, w), "residual has the shape"),
        (lambda x, r, n, w: (x, r, n[:3], w), "norm_weight has the shape"),
        (lambda x, r, n, w: (x.T.contiguous().T, r, n, w), "contiguous"),
    ],
)
def test_wrong_arguments_are_named(args, says) -> None:
    x, residual, norm, weight = args(*make(4, 16, 32, torch.float32))
    with pytest.raises(ValueError, match=says):
        sliced_linear(x, weight, residual=residual, norm_weight=norm)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("rows", "cols", "depth"), [(6, 3072, 2048), (6, 2048, 4096), (24, 5120, 2048), (1, 2048, 1024)]
)
def test_published_shapes_chained_in_a_graph(rows: int, cols: int, depth: int) -> None:
    """Two products, one on the other's output, replayed on fresh rows: what is read before the wait is weights only."""
    x, residual, norm, weight = make(rows, cols, depth, torch.bfloat16)
    back, ones = (draw(depth, cols, seed=9) / cols**0.5).bfloat16(), torch.ones(cols, device=DEVICE).bfloat16()

    def twice(product) -> tuple[Tensor, Tensor]:
        y = product(x, weight, residual=residual, norm_weight=norm, eps=1e-6)
        normed, _ = add_rms_norm(y if y.squares is None else y.sum(), None, ones, 1e-6)
        again = product(normed, back)
        return y.sum(), again.sum()

    twice(sliced_linear)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = twice(sliced_linear)
    for seed in range(1, 5):
        fresh = make(rows, cols, depth, torch.bfloat16, seed=10 * seed)
        x.copy_(fresh[0])
        residual.copy_(fresh[1])
        graph.replay()
        want = twice(reference.sliced_linear)
        close(got[0], want[0])
        close(got[1], want[1])
