"""Every dispatcher against plain references: ids after the map, padded rows that hold anything, room that runs out."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep import reference
from dspark_lab.ep.all_to_all import AllToAllDispatcher
from dspark_lab.ep.dispatch import (
    AllReduceDispatcher,
    Dispatched,
    EpContext,
    ExpertTable,
    LocalDispatcher,
    keep_range,
)
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.load import EpLoad
from dspark_lab.ep.padding import consume
from dspark_lab.ep.registry import BUILT_IN, factory_of
from dspark_lab.ep.shards import ChunkedRows, local_count
from dspark_lab.errors import LabError
from dspark_lab.plan.load import traffic
from dspark_lab.plan.padding import local_counts
from dspark_lab.plan.placement import place

E, K, H = 8, 3, 16
LOAD = [9, 1, 8, 2, 7, 3, 6, 4]


def nothing(_tensor):
    """One rank's share stays one rank's share."""


def context(ranks, placement, **more) -> EpContext:
    known = {"topk": K, "hidden_size": H, "dtype": torch.float32, "device": torch.device("cpu"), "rows_alike": True}
    return EpContext(placement=placement, ep_rank=ranks.rank, ranks=ranks, **{**known, **more})


def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows * (e + 1)) + e


def compute(handle: Dispatched, mine: tuple[int, ...]) -> torch.Tensor:
    """What a rank's experts do: the wanted ones only, 0 where there is none."""
    out = torch.zeros_like(handle.x)
    for row, (ids, weights) in enumerate(zip(handle.local_ids.tolist(), handle.topk_weights, strict=True)):
        for i, weight in zip(ids, weights, strict=True):
            if i >= 0:
                out[row] += weight * expert(mine[i], handle.x[row])
    return out


def batch(seed: int, num_rows: int, count: int | None, garbage: float = float("nan")):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, H, generator=g)
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(num_rows)])
    weights = torch.rand(num_rows, K, generator=g)
    if count is not None:
        x[count:] = garbage
    return x, ids, weights


def forward(dispatcher, placement, rank, x, ids, weights, count):
    scalar = None if count is None else torch.tensor(count, dtype=torch.int32)
    handle = dispatcher.dispatch(x, ids, weights, scalar)
    return dispatcher.combine(compute(handle, placement.experts_of(rank)), handle), handle


def test_negatives_stay_dropped():
    assert keep_range(torch.tensor([-1, 0, 1, 2, 3]), 2, 2).tolist() == [-1, -1, -1, 0, 1]
    table = ExpertTable(place("contiguous", 4, 2), torch.device("cpu"))
    assert table.physical(torch.tensor([[-1, 3]]), None).tolist() == [[-1, 3]]  # −1 would alias the last entry


@pytest.mark.parametrize("shape", [(), (1,)])
def test_mask_takes_one_element_of_either_shape(shape):
    table = ExpertTable(place("contiguous", 4, 2), torch.device("cpu"))
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    assert table.physical(ids, torch.full(shape, 2, dtype=torch.int32)).tolist() == [[0, 1], [2, 3], [-1, -1]]
    assert torch.equal(table.physical(ids, None), ids)


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("placement", ["contiguous", "round_robin", "balanced"])
def test_each_row_is_kept_by_exactly_one_rank(placement, redundant):
    _, ids, weights = batch(0, 6, None)
    p = place(placement, E, 4, redundant, load=LOAD)
    kept = torch.zeros(6, K, dtype=torch.int64)
    for rank in range(4):
        group = ExpertGroup(parallel=ParallelConfig(ep_size=4), ep_rank=rank, all_reduce=nothing)
        d = group.dispatcher(p, topk=K, hidden_size=H, dtype=torch.float32, device=torch.device("cpu"))
        assert isinstance(d, AllReduceDispatcher)
        local = d.dispatch(torch.zeros(6, H), ids, weights, torch.tensor(5, dtype=torch.int32)).local_ids
        mine = p.experts_of(rank)
        for row, k in (local >= 0).nonzero().tolist():
            assert mine[int(local[row, k])] == ids[row, k]
        kept += local >= 0
        if d.local_table is not None:  # what a router's kernel looks up gives the same
            row = torch.arange(len(ids))[:, None]
            turn = 0 if d.num_copies is None else row % d.num_copies[ids]
            assert torch.equal(d.local_table[turn, ids][:5], local[:5])
    assert (kept[:5] == 1).all()
    assert (kept[5] == 0).all()


ROWS_ALIKE = [(n, s) for n in ("all_reduce", "symm_mem") for s in (1, 2, 4)]


@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "size"), ROWS_ALIKE)
def test_rows_alike(name, size, garbage, on_threads):
    x, ids, weights = batch(1, 8, 5, garbage)
    want = reference.all_reduce(x, ids, weights, 5, expert)

    def rank(r):
        p = place("balanced", E, size, load=LOAD)
        return forward(factory_of(name)(context(r, p)), p, r.rank, x, ids, weights, 5)[0]

    for got in on_threads(size, rank):
        assert (got - want).abs().max() < 1e-5
        assert (got[5:] == 0).all()


COUNTS = {2: (4, 1), 4: (3, 0, 4, 1), 8: (0, 1, 2, 3, 4, 0, 0, 4)}


@pytest.mark.parametrize("policy", ["mask", "zero", "ignore"])
@pytest.mark.parametrize("redundant", [0, 8])
@pytest.mark.parametrize("how", [{}, {"fixed_sizes": True}])
@pytest.mark.parametrize("size", sorted(COUNTS))
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "symm_mem"])
def test_rows_of_their_own(name, size, how, redundant, policy, on_threads):
    """Uneven and idle ranks; padded rows are never sent, never computed, and exactly 0."""
    counts = COUNTS[size]
    batches = [batch(10 + r, 4, counts[r]) for r in range(size)]
    p = place("balanced", E, size, redundant, load=LOAD)
    want = getattr(reference, name)(*zip(*batches, strict=True), counts, expert)

    def rank(r):
        d = factory_of(name)(context(r, p, rows_alike=False, **how))
        x, ids, weights = batches[r.rank]
        scalar = torch.tensor(counts[r.rank], dtype=torch.int32)
        ids, weights = consume(policy, ids, weights, scalar)
        y, handle = forward(d, p, r.rank, x, ids, weights, counts[r.rank])
        real = (handle.local_ids >= 0).any(1)
        assert handle.x[real].isfinite().all()
        if name == "all_gather":
            assert handle.x.isfinite().all()  # the places of padded rows travel as zeros
        return y, handle

    done = on_threads(size, rank)
    for r, (got, handle) in enumerate(done):
        assert (got - want[r]).abs().max() < 1e-5
        assert (got[counts[r] :] == 0).all()
        if handle.rows_to is not None:
            real = batches[r][1][: counts[r]].numpy()
            assert handle.rows_to.tolist() == traffic(real, [r] * counts[r], p)[r].tolist()
    if name == "all_to_all" and not how:
        assert [len(h.x) for _, h in done] == sum(h.rows_to for _, h in done).tolist()


def test_the_same_bits_every_time(on_threads):
    p = place("contiguous", E, 4)

    def rank(r):
        d = AllToAllDispatcher(context(r, p, rows_alike=False))
        return [forward(d, p, r.rank, *batch(r.rank, 5, 4), 4)[0] for _ in range(2)]

    assert all(torch.equal(a, b) for a, b in on_threads(4, rank))


def test_a_room_that_is_too_small_is_counted(on_threads):
    p = place("contiguous", E, 2)

    def rank(r):
        d = AllToAllDispatcher(context(r, p, rows_alike=False, capacity_factor=0.5))
        assert d.fixed
        assert d.capacity(6) == 3
        x, _, weights = batch(r.rank, 6, 5)
        y, handle = forward(d, p, r.rank, x, torch.tensor([[0, 1, 2]]).expand(6, K), weights, 5)
        return int(d.overflow), y, handle

    for overflow, y, handle in on_threads(2, rank):
        assert overflow == 2  # five rows for rank 0, room for three
        assert handle.rows_to.tolist() == [5, 0]
        assert (y[3:] == 0).all()
        assert (y[:3] != 0).any()


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "symm_mem"])
@pytest.mark.parametrize("count", [5, 8, 0, None])
def test_chunks_of_rows_that_are_alike(name, count, on_threads):
    x, ids, weights = batch(3, 8, count)
    want = reference.all_reduce(x, ids, weights, count, expert)
    parallel = ParallelConfig(ep_size=4, dispatcher=name)

    def rank(r):
        p = place("round_robin", E, 4)
        group = ExpertGroup.of(parallel, r)
        d = group.dispatcher(p, topk=K, hidden_size=H, dtype=torch.float32, device=torch.device("cpu"))
        if name != "symm_mem":
            assert isinstance(d, ChunkedRows)
        return forward(d, p, r.rank, x, ids, weights, count)[0]

    for got in on_threads(4, rank):
        assert (got - want).abs().max() < 1e-5
        assert count is None or (got[count:] == 0).all()


@pytest.mark.parametrize(("g", "w", "t"), [(5, 8, 2), (3, 8, 4), (8, 8, 4), (0, 8, 4), (6, 24, 4)])
def test_count_of_a_chunk_on_the_device(g, w, t):
    for shape in ((), (1,)):
        counts = [local_count(torch.full(shape, g, dtype=torch.int32), w // t, r) for r in range(t)]
        assert all((c.dtype, c.numel()) == (torch.int32, 1) for c in counts)
        assert [int(c) for c in counts] == local_counts(g, w, t)


def test_rows_that_do_not_divide_are_refused(on_threads):
    parallel = ParallelConfig(ep_size=2, dispatcher="all_to_all")

    def rank(r):
        d = ExpertGroup.of(parallel, r).dispatcher(
            place("contiguous", E, 2), topk=K, hidden_size=H, dtype=torch.float32, device=torch.device("cpu")
        )
        with pytest.raises(LabError, match="7 padded rows are no multiple of the 2 ranks"):
            d.dispatch(*batch(0, 7, None), None)

    on_threads(2, rank)


def test_one_rank_leaves_ids_and_count_alone():
    ids = torch.tensor([[0, 1]])
    handle = LocalDispatcher().dispatch(
        torch.zeros(1, 4), ids, torch.ones(1, 2), count=torch.tensor(0, dtype=torch.int32)
    )
    assert handle.local_ids is ids


def test_group_is_checked():
    with pytest.raises(LabError, match="ep_size=2 needs a process group"):
        ExpertGroup(parallel=ParallelConfig(ep_size=2))
    with pytest.raises(LabError, match="ep_rank=2"):
        ExpertGroup(parallel=ParallelConfig(ep_size=2), ep_rank=2, all_reduce=nothing)


class Foreign:
    """Somebody else's dispatcher: all rows are everywhere, and the sum is theirs."""

    def __init__(self, made_of: EpContext) -> None:
        self.inner = AllReduceDispatcher(made_of)
        self.num_calls = 0

    def dispatch(self, x, topk_ids, topk_weights, count):
        self.num_calls += 1
        return self.inner.dispatch(x, topk_ids, topk_weights, count)

    def combine(self, y, handle):
        return self.inner.combine(y, handle)


def test_foreign_dispatchers_are_found_by_path(monkeypatch):
    import sys
    import types

    module = types.ModuleType("deepep_like")
    module.Foreign, module.number = Foreign, 3
    monkeypatch.setitem(sys.modules, "deepep_like", module)
    assert factory_of("deepep_like:Foreign") is Foreign
    with pytest.raises(LabError, match="is a int and must be a callable"):
        factory_of("deepep_like:number")
    with pytest.raises(LabError, match="cannot be imported"):
        factory_of("deepep_like:Missing")
    with pytest.raises(LabError, match=r"dispatcher='all_to_al'.*all_to_all"):
        factory_of("all_to_al")
    assert set(BUILT_IN) >= {"all_reduce", "all_gather", "all_to_all", "symm_mem"}


def test_zero_is_no_mask():
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    count = torch.tensor([1], dtype=torch.int32)
    assert consume("zero", ids, weights, count)[1].tolist() == [[1, 1], [0, 0]]
    assert consume("zero", ids, weights, count)[0] is ids
    assert consume("ignore", ids, weights, count)[1] is weights
    assert math.isnan(0 * float("nan"))


def test_load_counts_the_last_expert_and_drops_negatives():
    class Sends:
        bytes_a_row = 100

        def wire_bytes(self, num_rows):
            return 16 * num_rows

    load = EpLoad(num_layers=2, num_local_experts=3, device="cpu", dispatchers=[Sends(), Sends()])

    def handle(ids, rows_to=None):
        return Dispatched(x=torch.zeros(len(ids), 1), local_ids=ids, topk_weights=ids, rows_to=rows_to)

    load.add(1, handle(torch.tensor([[-1, 0], [2, 2], [-1, -1]])), 3)
    load.add(1, handle(torch.tensor([[2, 1]]), torch.tensor([5, 2])), 1)
    report = load.report(ep_rank=0)
    assert report["rows"] == [[0, 0, 0], [1, 1, 3]]
    assert report["num_dropped"] == [0, 3]
    assert report["num_tokens"] == [0, 4]
    assert report["rows_to"] == [[5, 2]]
    assert report["bytes_sent"] == 4 * 16 + 2 * 100
    load.reset()
    assert load.report()["rows"] == [[0, 0, 0], [0, 0, 0]]
    assert load.report()["bytes_sent"] == 0
