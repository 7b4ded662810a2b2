"""Packing against its reference, and by hand: what travels, in which order, and what has no room."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dspark_kernels.packing import RowLayout, kernel, pack, pack_by_rank, reference, sum_places, unpack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EXPERTS, NUM_RANKS = 8, 2
SHAPES = [(64, 2, torch.float32), (10, 3, torch.float32), (2048, 8, torch.bfloat16), (70, 1, torch.bfloat16)]


def made(num_rows: int, layout: RowLayout, *, copies: bool, count: int | None = None) -> tuple[Tensor | None, ...]:
    """x, ids (some −1), weights, table, num_copies, count; rows from the count on hold NaN."""
    g = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, layout.hidden_size, generator=g).to(layout.dtype)
    weights = torch.rand(num_rows, layout.topk, generator=g)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=g)[: layout.topk] for _ in range(num_rows)])
    ids[num_rows // 2, -1] = -1
    scalar = None
    if count is not None:
        x[count:], weights[count:] = float("nan"), float("nan")
        scalar = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(NUM_EXPERTS, generator=g)[None]
    num_copies = None
    if copies:  # experts 0 and 3 have a second copy, on the other rank's spare places
        table = torch.cat([table, table]).clone()
        table[1, 0], table[1, 3] = 9, 8
        num_copies = torch.ones(NUM_EXPERTS, dtype=torch.int64)
        num_copies[[0, 3]] = 2
    return tuple(None if t is None else t.to(DEVICE) for t in (x, ids, weights, table, num_copies, scalar))


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert torch.equal(g, w)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("count", [None, 0, 3, 7])
@pytest.mark.parametrize(("hidden", "topk", "dtype"), SHAPES)
def test_there_and_back(hidden: int, topk: int, dtype: torch.dtype, count: int | None, copies: bool) -> None:
    layout = RowLayout(hidden_size=hidden, topk=topk, dtype=dtype)
    assert layout.row_bytes % 16 == 0
    x, ids, weights, table, num_copies, scalar = made(7, layout, copies=copies, count=count)
    args = (x, ids, weights, layout, table, num_copies, scalar)
    rows = pack(*args)
    assert rows.shape == (7, layout.row_bytes)
    into = torch.zeros_like(rows)
    assert pack(*args, out=into) is into
    for first in (0, 5):
        want = reference.unpack(reference.pack(*args), layout, first, 5)
        same(unpack(rows, layout, first, 5), want)
        same(unpack(into, layout, first, 5), want)
    everywhere = unpack(rows, layout, 0, 10)
    assert torch.equal(everywhere[1], reference.physical_ids(ids, table, num_copies, scalar))
    real = 7 if count is None else count
    assert torch.equal(everywhere[0][:real], x[:real])
    assert (everywhere[0][real:] == 0).all()
    assert (everywhere[1][real:] == -1).all()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("room", [1, 3, 6])
@pytest.mark.parametrize("count", [None, 4])
def test_by_rank(count: int | None, room: int, copies: bool) -> None:
    layout = RowLayout(hidden_size=20, topk=2, dtype=torch.float32)
    x, ids, weights, table, num_copies, scalar = made(6, layout, copies=copies, count=count)
    sides = []
    for op in (pack_by_rank, reference.pack_by_rank):
        overflow = torch.tensor([10], device=DEVICE)
        sent = op(
            x, ids, weights, layout, table, num_copies, scalar, num_ranks=2, num_local=5, room=room, overflow=overflow
        )
        sides.append((*reference.unpack(sent.rows, layout, 0, 10), sent.places, sent.rows_to, overflow))
    same(*sides)


def test_by_rank_by_hand() -> None:
    """Row 0 goes to both ranks, row 1 to the second, row 2 to the first, which has one place only."""
    layout = RowLayout(hidden_size=4, topk=2, dtype=torch.float32)
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    ids = torch.tensor([[0, 3], [2, 3], [1, -1]], device=DEVICE)
    table, overflow = torch.arange(4, device=DEVICE)[None], torch.zeros(1, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(3, 2, device=DEVICE)
    sent = pack_by_rank(x, ids, weights, layout, table, None, None, num_ranks=2, num_local=2, room=1, overflow=overflow)
    assert sent.places.tolist() == [[0, 2, 2], [1, 2, 2]]
    assert sent.rows_to.tolist() == [2, 2]
    assert overflow.tolist() == [2]
    got, local, _ = unpack(sent.rows, layout, 0, 2)
    assert torch.equal(got, x[[0, 0]])
    assert local.tolist() == [[0, -1], [0, -1]]
    out = sum_places(torch.tensor([[1.0] * 4, [10.0] * 4], device=DEVICE), sent.places)
    assert out.tolist() == [[11.0] * 4, [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 700])
def test_sum_places(width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    back = torch.randn(9, width, generator=g).to(DEVICE, dtype)
    places = torch.randint(0, 10, (3, 5), generator=g).to(DEVICE)
    # The interpreter rounds to bfloat16 towards zero.
    close = {"rtol": 2**-7, "atol": 0.0} if dtype == torch.bfloat16 and DEVICE == "cpu" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(sum_places(back, places), reference.sum_places(back, places), **close)


def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "sum_places", lambda *args: "kernel")
    assert sum_places(torch.zeros(2, 4, device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)) == "kernel"


def test_wrong_shapes_are_named() -> None:
    layout = RowLayout(hidden_size=4, topk=2, dtype=torch.float32)
    x, ids, weights = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    table = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs num_copies"):
        pack(x, ids, weights, layout, table, None, None)
    with pytest.raises(ValueError, match=r"must be \[T, 4\]"):
        pack(x[:, :3], ids, weights, layout, table[:1], None, None)
    with pytest.raises(ValueError, match=r"must be \[R, 48\] uint8"):
        unpack(torch.zeros(2, 40, dtype=torch.uint8), layout, 0, 2)
