"""Dropped rows: masked after the map to physical ids, never aliased to a real expert."""

import pytest
import torch

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.dispatch import AllReduceDispatcher, ExpertGroup, LocalDispatcher, keep_range, mask_padded
from dspark_lab.ep.load import EpLoad
from dspark_lab.errors import LabError
from dspark_lab.plan.placement import place


def nothing(_tensor):
    """One rank's share stays one rank's share."""


def test_negatives_stay_dropped():
    assert keep_range(torch.tensor([-1, 0, 1, 2, 3]), 2, 2).tolist() == [-1, -1, -1, 0, 1]
    assert keep_range(torch.tensor([-1, 0, 1, 2, 3]), 0, 2).tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_mask_takes_one_element_of_either_shape(shape):
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    masked = mask_padded(ids, torch.full(shape, 2, dtype=torch.int32))
    assert masked.tolist() == [[0, 1], [2, 3], [-1, -1]]
    assert mask_padded(ids, None) is ids


@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_each_row_is_kept_by_exactly_one_rank(placement):
    ids = torch.tensor([[0, 3], [2, 1], [3, 0], [1, 2]])
    x, weights = torch.zeros(4, 8), torch.ones(4, 2)
    p = place(placement, 4, 2)
    kept = []
    for rank in range(2):
        d = AllReduceDispatcher(p, rank, nothing, "cpu")
        local = d.dispatch(x, ids, weights, torch.tensor(3, dtype=torch.int32)).local_ids
        mine = p.experts_of(rank)
        for row in range(4):
            for k in range(2):
                if local[row, k] >= 0:
                    assert mine[int(local[row, k])] == ids[row, k]
        kept.append(local >= 0)
    assert (kept[0] ^ kept[1])[:3].all()
    assert not (kept[0] | kept[1])[3].any()


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


def test_load_counts_the_last_expert_and_drops_negatives():
    load = EpLoad(num_layers=2, num_local_experts=3, num_ranks=2, topk=2, row_bytes=16, device="cpu")
    load.add(1, torch.tensor([[-1, 0], [2, 2], [-1, -1]]))
    load.add(1, torch.tensor([[2, 1]]))
    report = load.report()
    assert report["rows"] == [[0, 0, 0], [1, 1, 3]]
    assert report["num_dropped"] == [0, 3]
    assert report["num_tokens"] == [0, 4]
    assert report["bytes_sent"] == 4 * 16
    load.reset()
    assert load.report()["rows"] == [[0, 0, 0], [0, 0, 0]]
