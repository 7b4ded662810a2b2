"""Schedules: the paper's examples, brute force over small cases, and who biases the output (appendix A)."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

from dspark_lab.errors import LabError
from dspark_lab.plan.costs import AdditiveTable, CostWarning, StepTable
from dspark_lab.plan.schedule import (
    Schedule,
    best_budget,
    early_stop,
    expected_tokens,
    objective,
    split,
    survival,
    token_curve,
)
from dspark_lab.plan.scheduler import Scheduler
from dspark_lab.spec.split import split_budget

PAPER = survival(np.array([[0.9, 0.9], [0.5, 0.5]]))


def table(*ms: float, first: int = 2) -> StepTable:
    return StepTable(tokens=tuple(range(first, first + len(ms))), seconds=tuple(x / 1e3 for x in ms))


# -- worked examples -------------------------------------------------------------------------------------------


def test_expected_tokens_of_each_budget() -> None:
    assert PAPER.tolist() == [[0.9, pytest.approx(0.81)], [0.5, 0.25]]
    assert token_curve(PAPER).tolist() == pytest.approx([2, 2.9, 3.71, 4.21, 4.46])
    assert expected_tokens(PAPER, split(PAPER, 3).lengths) == pytest.approx(4.21)


@pytest.mark.parametrize(
    ("ms", "by_search", "by_stop"),
    [((10, 10.5, 11, 13, 15), 2, 2), ((10, 15, 15, 15, 15), 4, 0), ((10, 10, 10, 10, 10), 4, 4)],
)
def test_step_times_of_the_paper(ms, by_search, by_stop) -> None:
    costs = table(*ms)
    assert best_budget(PAPER, costs) == by_search
    stopped = early_stop(PAPER, costs)
    assert stopped.budget == by_stop
    lens = {0: [1, 1], 2: [3, 1], 4: [3, 3]}
    assert stopped.verify_lens.tolist() == lens[by_stop]
    assert split(PAPER, by_search).verify_lens.tolist() == lens[by_search]
    assert stopped.num_tokens == 2 + by_stop


def test_equals_go_by_position_then_by_request() -> None:
    certain = np.ones((3, 4))
    assert split(certain, 4).lengths.tolist() == [2, 1, 1]
    assert split(certain, 7).lengths.tolist() == [3, 2, 2]
    assert early_stop(certain, table(1, first=3)).lengths.tolist() == [4, 4, 4]


def test_drafts_without_a_chance_are_no_candidates() -> None:
    a = survival(np.array([[0.9, 0.0, 0.9], [1e-7, 1.0, 1.0]]))
    assert split(a, 6).lengths.tolist() == [1, 0]
    assert split(a, 6, least=0.0).lengths.tolist() == [1, 3]
    assert len(token_curve(a)) == 5


def test_what_is_no_probability_is_refused() -> None:
    for bad in (np.nan, -0.1, 1.1, np.inf):
        with pytest.raises(LabError, match="request 1 at position 2"):
            survival(np.array([[0.5, 0.5], [0.5, bad]]))
    with pytest.raises(LabError, match="budget=-1"):
        split(PAPER, -1)


# -- brute force -----------------------------------------------------------------------------------------------


def best_by_force(a: np.ndarray, costs) -> list[float]:
    """Θ of the best lengths of each budget, over all vectors of lengths."""
    num, gamma = a.shape
    best = [0.0] * (num * gamma + 1)
    for lengths in itertools.product(range(gamma + 1), repeat=num):
        k = sum(lengths)
        tau = num + sum(a[r, j] for r in range(num) for j in range(lengths[r]))
        best[k] = max(best[k], tau / float(costs.seconds_at(num, [num + k])[0]))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_against_all_vectors_of_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, gamma = [(1, 4), (2, 3), (3, 2)][seed % 3]
    a = survival(np.round(rng.uniform(0.05, 1, (num, gamma)), 1))  # rounded: there are ties
    n = num * gamma + 1
    stair = StepTable(tokens=tuple(range(num, num + n)), seconds=tuple(np.sort(rng.choice([1.0, 1.2, 1.9, 2.4], n))))
    slope = AdditiveTable(
        bias_s=1.0, requests=(1,), alpha_s=(0.1,), tokens=(1, 20), theta_s=(0.0, float(rng.uniform(1, 9)))
    )
    for costs in (stair, slope):
        wanted = best_by_force(a, costs)
        assert objective(a, costs).tolist() == pytest.approx(wanted)
        k = best_budget(a, costs)
        assert wanted[k] == pytest.approx(max(wanted))
        assert k == 0 or max(wanted[:k]) < wanted[k]
        chosen = split(a, k)
        assert chosen.lengths.sum() == k
        tau = expected_tokens(a, chosen.lengths)
        assert tau / float(costs.seconds_at(num, [num + k])[0]) == pytest.approx(max(wanted))
        stop = next((i for i in range(len(wanted) - 1) if wanted[i + 1] <= wanted[i] * (1 + 1e-12)), len(wanted) - 1)
        assert early_stop(a, costs).budget == stop


def test_the_split_on_tensors_is_the_same() -> None:
    rng = np.random.default_rng(0)
    for budget in (0, 1, 5, 11, 20, 99):
        c = np.round(rng.uniform(0, 1, (4, 5)), 1)
        c[1] = 1.0
        wanted = split(survival(c), budget).lengths.tolist()
        assert split_budget(torch.tensor(c), budget).tolist() == wanted
        padded = torch.cat([torch.tensor(c), torch.ones(2, 5, dtype=torch.float64)])
        real = torch.tensor([True] * 4 + [False] * 2)
        assert split_budget(padded, torch.tensor([budget]), is_real=real).tolist() == [*wanted, 0, 0]


# -- as deployed -----------------------------------------------------------------------------------------------

CLIFF = table(10, 15, 15, 15, 15)
HOPELESS = np.full((2, 2), 0.01)


def test_the_budget_comes_from_two_rounds_before_and_the_split_from_now() -> None:
    s = Scheduler(table(10, 10.5, 11, 13, 15), block_size=2, max_requests=2)
    now = np.array([[0.1, 0.1], [0.9, 0.9]])
    paper = np.array([[0.9, 0.9], [0.5, 0.5]])
    assert s.schedule(0, ["a", "b"], paper).lengths.tolist() == [2, 2]  # nothing is known yet
    assert s.schedule(1, ["a", "b"], HOPELESS).budget is None
    third = s.schedule(2, ["a", "b"], now)
    assert (third.budget, third.lengths.tolist()) == (2, [0, 2])
    assert s.schedule(3, ["a", "b"], now).budget == 0  # of round 1
    assert s.budget(9, ["a", "b"]) is None  # a relay that is missing


def test_rows_of_another_generation_count_as_certain() -> None:
    costs = table(10, 12, 14, 16, 18)
    s = Scheduler(costs, block_size=2, max_requests=2)
    s.publish(0, [("slot", 0), ("slot 1", 0)], HOPELESS)
    assert s.budget(2, [("slot", 0), ("slot 1", 0)]) == 0
    assert s.budget(2, [("slot", 0), ("slot 1", 1)]) == best_budget(np.array([[0.01, 1e-4], [1, 1]]), costs) == 2
    assert s.budget(2, [("slot 1", 0), ("slot", 0)]) == 0  # rows move, their names stay


def test_it_is_loud_where_nothing_can_be_trimmed() -> None:
    with pytest.warns(CostWarning, match="no step costs were measured.*NOTHING IS TRIMMED"):
        s = Scheduler(None, block_size=2, max_requests=2)
    assert not s.trims
    s.publish(0, ["a", "b"], np.full((2, 2), 0.3))
    assert s.budget(2, ["a", "b"]) == 4
    with pytest.warns(CostWarning, match="flat"):
        Scheduler(table(10, 10, 10), block_size=2, max_requests=2)
    with pytest.warns(CostWarning, match="ends at 6 tokens and 8 whole blocks are 24"):
        Scheduler(CLIFF, block_size=2, max_requests=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Scheduler(CLIFF, block_size=2, max_requests=2).trims


def test_what_the_scheduler_refuses() -> None:
    with pytest.raises(LabError, match=r"lag=0.*early_stop"):
        Scheduler(CLIFF, block_size=2, max_requests=2, lag=0)
    s = Scheduler(CLIFF, block_size=2, max_requests=2)
    with pytest.raises(LabError, match="block_size=2 need"):
        s.publish(0, ["a"], np.ones((1, 3)))
    with pytest.raises(LabError, match="names a row twice"):
        s.publish(0, ["a", "a"], HOPELESS)


# -- appendix A ------------------------------------------------------------------------------------------------

TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])
SECOND = {0: 0.9, 1: 0.0}
"""c2 by the token drafted first: A promises much, B nothing."""
LEAK = StepTable(tokens=(1, 2, 3), seconds=(1 / 1.0, 1 / 0.5, 1 / 0.45))


def confidence_of(token: int) -> np.ndarray:
    return np.array([[0.8, SECOND[token]]])


def searched(token: int) -> Schedule:
    a = survival(confidence_of(token))
    return split(a, best_budget(a, LEAK))


def stopped(token: int) -> Schedule:
    return early_stop(survival(confidence_of(token)), LEAK)


def first_token(drafted: int, length: int) -> np.ndarray:
    """Law of the round's first output given the draft and how far it is verified: chain sampling by its formulas."""
    if not length:
        return TARGET
    accept = min(1.0, TARGET[drafted] / DRAFT[drafted])
    residual = np.maximum(TARGET - DRAFT, 0)
    return accept * np.eye(2)[drafted] + (1 - accept) * residual / residual.sum()


def law(schedule) -> np.ndarray:
    """Of the first output, over all drafts."""
    return sum(DRAFT[x] * first_token(x, int(schedule(x).lengths[0])) for x in (0, 1))


def test_the_figures_of_the_leak() -> None:
    assert objective(survival(confidence_of(0)), LEAK).tolist() == pytest.approx([1, 0.9, 1.134])
    assert objective(survival(np.array([[0.8, 1e-9]])), LEAK)[2] == pytest.approx(0.81)
    assert [int(searched(x).lengths[0]) for x in (0, 1)] == [2, 0]
    assert [int(stopped(x).lengths[0]) for x in (0, 1)] == [0, 0]


def test_a_search_of_the_blocks_own_confidences_is_biased_as_appendix_a_says() -> None:
    assert law(searched) == pytest.approx([0.85, 0.15])
    rng = np.random.default_rng(0)
    drafted = rng.choice(2, 40_000, p=DRAFT)
    verified = np.array([int(searched(x).lengths[0]) > 0 for x in (0, 1)])[drafted]
    accepted = rng.random(len(drafted)) < (TARGET / DRAFT)[drafted]
    redrawn = np.where(verified, 0, rng.choice(2, len(drafted), p=TARGET))  # the residual is all A
    output = np.where(verified & accepted, drafted, redrawn)
    assert np.mean(output == 0) == pytest.approx(0.85, abs=4 * np.sqrt(0.85 * 0.15 / len(drafted)))


def test_early_stop_is_exact() -> None:
    assert law(stopped) == pytest.approx(TARGET)


def test_the_deployed_schedule_is_exact() -> None:
    for older in (0, 1):  # whatever was drafted two rounds before
        scheduler = Scheduler(LEAK, block_size=2, max_requests=1)
        scheduler.publish(0, ["r"], confidence_of(older))
        scheduler.publish(1, ["r"], confidence_of(older))
        budgets = [scheduler.budget(2, ["r"])] * 2
        assert budgets == [2, 2] if older == 0 else [0, 0]
        assert law(lambda x, k=budgets[0]: split(survival(confidence_of(x)), k)) == pytest.approx(TARGET)
