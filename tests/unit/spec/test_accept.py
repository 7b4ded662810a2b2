"""Greedy acceptance, the threshold cut and simulated lengths, against worked examples."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.accept import greedy_accept
from dspark_lab.spec.accept import proposal_lengths, simulated_accepts


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_longest_matching_prefix_and_its_bonus() -> None:
    # anchor 7, drafts 3 5 9; the target says 3 5 8 1
    out = greedy_accept(ids([3, 5, 9]), ids([3, 5, 8, 1]), torch.tensor([3]))
    assert out.num_accepted.tolist() == [2]
    assert out.bonus.tolist() == [8]
    assert out.out_tokens[0, :3].tolist() == [3, 5, 8]


def test_the_bonus_is_read_again_where_the_proposal_was_cut() -> None:
    out = greedy_accept(ids([3, 5, 9]), ids([3, 5, 8, 1]), torch.tensor([1]))
    assert out.num_accepted.tolist() == [1]
    assert out.bonus.tolist() == [5]
    assert out.out_tokens[0, :2].tolist() == [3, 5]


def test_a_match_after_a_miss_does_not_count() -> None:
    out = greedy_accept(ids([1, 2, 3]), ids([9, 2, 3, 4]), torch.tensor([3]))
    assert out.num_accepted.tolist() == [0]
    assert out.bonus.tolist() == [9]


def test_whole_block_accepted_gives_the_target_token_behind_it() -> None:
    out = greedy_accept(ids([1, 2, 3], [1, 2, 3]), ids([1, 2, 3, 4], [1, 2, 3, 4]), torch.tensor([3, 0]))
    assert out.num_accepted.tolist() == [3, 0]
    assert out.bonus.tolist() == [4, 1]
    assert out.out_tokens[0].tolist() == [1, 2, 3, 4]


def test_threshold_cuts_before_the_first_confidence_strictly_below() -> None:
    c = torch.tensor([[0.9, 0.5, 0.4, 0.99], [0.4, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]])
    assert proposal_lengths(c, 0.5, 3, 4, torch.device("cpu")).tolist() == [2, 0, 4]
    assert proposal_lengths(c, 0.0, 3, 4, torch.device("cpu")).tolist() == [4, 4, 4]


@pytest.mark.parametrize("length", [1.0, 1.25, 2.96, 4.7, 6.0])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_simulated_lengths_keep_their_mean(length: float, batch: int) -> None:
    draws = 1 + simulated_accepts(length, 4096, batch, seed=0).double()
    assert abs(draws.mean().item() - length) < 0.03
    assert draws.min() >= int(length)
    assert draws.max() <= int(length) + 1
    if length == 4.7:  # not rounded once: the lengths of single steps differ
        assert len(draws[:, 0].unique()) == 2


def test_forced_lengths_are_capped_by_the_proposal() -> None:
    out = greedy_accept(ids([1, 2, 3]), ids([9, 8, 7, 6]), torch.tensor([1]), forced=torch.tensor([3]))
    assert out.num_accepted.tolist() == [1]
    assert out.bonus.tolist() == [8]
