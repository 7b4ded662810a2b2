"""Chain rejection sampling: worked cases, greedy rows token by token, and the distribution of what is committed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_kernels.accept import greedy_accept
from dspark_kernels.sampling.reference import (
    ACCEPT,
    BONUS,
    DRAFT,
    chain_accept,
    draw,
    probabilities,
    uniforms,
)
from dspark_lab.plan.costs import StepTable
from dspark_lab.plan.schedule import best_budget, early_stop, split, survival
from dspark_lab.runs.record import Acceptance
from dspark_lab.spec.sampling import Sampling, sampling_rows


def accept(drafts, p_d, p_t, lengths, u, v):
    return chain_accept(
        torch.tensor(drafts), torch.tensor(p_d), torch.tensor(p_t), torch.tensor(lengths), accept_noise=torch.tensor(u), bonus_noise=torch.tensor(v)
    )  # fmt: skip


P_D = [[[0.5, 0.5], [0.5, 0.5]]]
P_T = [[[0.7, 0.3], [0.2, 0.8], [0.4, 0.6]]]


@pytest.mark.parametrize(
    ("drafts", "length", "u", "v", "num", "bonus"),
    [
        ([0, 1], 2, [0.99, 0.99], [0, 0, 0.5], 2, 1),  # both ratios over 1; the bonus of p_t behind them
        ([0, 1], 2, [0.99, 0.99], [0, 0, 0.3], 2, 0),
        ([1, 1], 2, [0.61, 0.0], [0.99, 0, 0], 0, 0),  # .3/.5 = .6 < u: the residual is all token 0
        ([1, 1], 2, [0.59, 0.0], [0, 0, 0.5], 2, 1),
        ([0, 0], 2, [0.0, 0.41], [0, 0, 0], 1, 1),  # .2/.5 = .4 < u: the residual is all token 1
        ([0, 1], 1, [0.0, 0.0], [0, 0.1, 0], 1, 0),  # cut: p_t of the cut position, no residual
        ([0, 1], 1, [0.0, 0.0], [0, 0.3, 0], 1, 1),
        ([1, 1], 0, [0.0, 0.0], [0.8, 0, 0], 0, 1),  # nothing verified: a plain draw
    ],
)
def test_worked_cases(drafts, length, u, v, num, bonus) -> None:
    out = accept([drafts], P_D, P_T, [length], [u], [v])
    assert (out.num_accepted.item(), out.bonus.item()) == (num, bonus)
    assert out.out_tokens[0, : num + 1].tolist() == [*drafts[:num], bonus]


def test_a_zero_filled_tail_is_not_accepted() -> None:
    out = accept([[0, 0]], [[[1.0, 0.0]] * 2], [[[1.0, 0.0]] * 3], [1], [[0.0, 0.0]], [[0.5] * 3])
    assert out.num_accepted.item() == 1


def test_without_drafts_it_is_plain_sampling() -> None:
    none = torch.zeros(1, 0, dtype=torch.int64)
    out = chain_accept(none, torch.zeros(1, 0, 2), torch.tensor([[[0.7, 0.3]]]), torch.tensor([0]), accept_noise=torch.zeros(1, 0), bonus_noise=torch.tensor([[0.9]]))  # fmt: skip
    assert out.out_tokens.tolist() == [[1]]


def test_greedy_rows_of_a_mixed_batch_are_greedy_acceptance_token_by_token() -> None:
    torch.manual_seed(0)
    b, gamma, v = 400, 4, 3
    mixed = sampling_rows([Sampling(temperature=0.0 if i % 2 else 0.8) for i in range(b)])
    draft_logits, target_logits = torch.randn(b, gamma, v), torch.randn(b, gamma + 1, v)
    p_d, p_t = probabilities(draft_logits, mixed), probabilities(target_logits, mixed)
    noise = uniforms(3, torch.arange(b), torch.full((b,), 9), gamma + 1)
    drafts = draw(p_d, noise[:, :gamma, DRAFT])
    lengths = torch.arange(b) % (gamma + 1)

    def chained(rows: Tensor):
        n = noise[rows]
        return chain_accept(
            drafts[rows],
            p_d[rows],
            p_t[rows],
            lengths[rows],
            accept_noise=n[:, :gamma, ACCEPT],
            bonus_noise=n[..., BONUS],
        )

    out, greedy = chained(torch.arange(b)), greedy_accept(drafts, target_logits.argmax(-1), lengths)
    odd = torch.arange(1, b, 2)
    assert all(torch.equal(ours[odd], theirs[odd]) for ours, theirs in zip(out, greedy, strict=True))
    assert torch.equal(drafts[odd], draft_logits.argmax(-1)[odd])
    assert not torch.equal(out.num_accepted, greedy.num_accepted)
    alone = chained(torch.arange(0, b, 2))  # sampling rows do not feel the greedy ones
    assert all(torch.equal(ours[::2], theirs) for ours, theirs in zip(out, alone, strict=True))


# -- lossless in distribution ------------------------------------------------------------------------------------

V, GAMMA, LENGTH, NUM = 3, 3, 4, 40_000
Lengths = Callable[[int, list[Tensor], Tensor], Tensor]
"""(round, confidences of all rounds so far [N, γ] each, drafts [N, γ]) to drafts verified [N]."""
STAIR = StepTable(tokens=(1, 2, 3, 4), seconds=(1.0, 2.2, 2.3, 2.4))
SLOPE = StepTable(tokens=(1, 2, 3, 4), seconds=(1.0, 1.3, 1.6, 1.9))


def models(setting: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Target and draft distributions [V, V] by the token before, after ``setting``; confidences [V, V] by the draft's own two
    last tokens, which tell much of them."""
    g = torch.Generator().manual_seed(1)
    target, draft = 1.2 * torch.randn(V, V, generator=g), 1.2 * torch.randn(V, V, generator=g)
    rows = sampling_rows([setting] * V)
    confidence = torch.tensor([0.95, 0.6, 0.1]) - 0.02 * torch.arange(V)[:, None]
    return probabilities(target, rows), probabilities(draft, rows), confidence


def generated(setting: Sampling, lengths_of: Lengths) -> tuple[Tensor, Acceptance]:
    """[NUM, LENGTH] tokens after an anchor 0, many requests at once, each by as many rounds as it takes."""
    p_t, p_d, confidence = models(setting)
    requests, anchors = torch.arange(NUM), torch.zeros(NUM, dtype=torch.int64)
    last, out = torch.zeros(NUM, dtype=torch.int64), torch.zeros(NUM, LENGTH + GAMMA + 1, dtype=torch.int64)
    told: list[Tensor] = []
    accepts, proposals = [], []
    while (running := anchors < LENGTH).any():
        noise = uniforms(17, requests, anchors, GAMMA + 1)
        chain = [last]
        for k in range(GAMMA):
            chain.append(draw(p_d[chain[-1]], noise[:, k, DRAFT]))
        block = torch.stack(chain, dim=1)
        told.append(torch.stack([confidence[block[:, max(k - 1, 0)], block[:, k]] for k in range(GAMMA)], dim=1))
        lengths = lengths_of(len(told) - 1, told, block[:, 1:])
        done = chain_accept(
            block[:, 1:], p_d[block[:, :-1]], p_t[block], lengths, accept_noise=noise[:, :GAMMA, ACCEPT], bonus_noise=noise[..., BONUS]
        )  # fmt: skip
        for j in range(GAMMA + 1):
            write = running & (j <= done.num_accepted)
            out[write, anchors[write] + j] = done.out_tokens[write, j]
        accepts += (done.num_accepted[running] + 1).tolist()
        proposals += lengths[running].tolist()
        anchors = torch.where(running, anchors + done.num_accepted + 1, anchors)
        last = torch.where(running, done.bonus, last)
    return out[:, :LENGTH], Acceptance.of_rounds(accepts, proposals, block_size=GAMMA)


def law(setting: Sampling, length: int = LENGTH) -> Tensor:
    """[V ** length] the target's own distribution of ``length`` tokens after the anchor."""
    p_t = models(setting)[0].double()
    joint = p_t[0]
    for _ in range(length - 1):
        joint = (joint.view(-1, V, 1) * p_t).flatten()
    return joint


def off(tokens: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How far ``tokens`` [N, L] are from ``wanted`` [V ** L]: χ² over its limit at 1 in 100,000, and total variation over what
    chance gives."""
    num, length = tokens.shape
    cells = (tokens * V ** torch.arange(length - 1, -1, -1)).sum(dim=1)
    count = torch.bincount(cells, minlength=V**length).double()
    assert not count[wanted == 0].any()
    expected = num * wanted[wanted > 0]
    chi2 = float(((count[wanted > 0] - expected) ** 2 / expected).sum())
    df = len(expected) - 1
    limit = df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3  # Wilson and Hilferty
    chance = float((expected * (1 - expected / num) / (2 * math.pi)).sqrt().sum()) / num
    return chi2 / limit, float((count / num - wanted).abs().sum()) / 2 / chance


def whole(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    return torch.full((len(drafts),), GAMMA)


def cut(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    """By request: 0, 1, 2 or 3 drafts."""
    return torch.arange(len(drafts)) % (GAMMA + 1)


def threshold(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    return (told[-1] >= 0.45).to(torch.int64).cumprod(dim=1).sum(dim=1)


def by_rule(rule: Callable[[np.ndarray], int]) -> Callable[[Tensor], Tensor]:
    """A rule on survivals of one request, for many: each different row is asked once."""

    def many(confidence: Tensor) -> Tensor:
        rows, at = confidence.unique(dim=0, return_inverse=True)
        return torch.tensor([rule(survival(row[None].numpy())) for row in rows])[at]

    return many


STOPPED = by_rule(lambda a: int(early_stop(a, SLOPE).lengths[0]))
SEARCHED = by_rule(lambda a: best_budget(a, STAIR))


def stopped(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    return STOPPED(told[-1])


def deployed(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    """The budget of the request's own confidences two rounds before."""
    return SEARCHED(told[-3]) if index >= 2 else whole(index, told, drafts)


def shared(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    """Two requests each share three drafts by their present confidences."""
    pairs, at = told[-1].view(-1, 2 * GAMMA).unique(dim=0, return_inverse=True)
    return torch.tensor(np.array([split(survival(p.view(2, GAMMA).numpy()), 3).lengths for p in pairs]))[at].flatten()


def searched(index: int, told: list[Tensor], drafts: Tensor) -> Tensor:
    """What nobody may do: the budget of the very confidences."""
    return SEARCHED(told[-1])


WARM, CUT = Sampling(temperature=1.1), Sampling(temperature=1.4, top_k=2, top_p=0.9)


@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        (WARM, whole),
        (WARM, cut),
        (WARM, threshold),
        (WARM, stopped),
        (WARM, deployed),
        (WARM, shared),
        (CUT, whole),
        (CUT, deployed),
    ],
    ids=lambda x: x.__name__ if callable(x) else x.label,
)
def test_what_is_committed_has_the_targets_distribution(setting, schedule) -> None:
    tokens, acceptance = generated(setting, schedule)
    chi2, variation = off(tokens, law(setting))
    assert chi2 < 1
    assert variation < 1.5
    assert acceptance.accept_length == pytest.approx(1 + sum(acceptance.by_position))
    assert acceptance.accept_length > 1.2


def test_requests_that_share_a_budget_stay_independent() -> None:
    tokens, _ = generated(WARM, shared)
    one = law(WARM, 2)
    together = torch.cat([tokens[0::2, :2], tokens[1::2, :2]], dim=1)
    chi2, variation = off(together, torch.outer(one, one).flatten())
    assert chi2 < 1
    assert variation < 1.5


def test_a_search_of_the_blocks_own_confidences_does_not() -> None:
    tokens, acceptance = generated(WARM, searched)
    chi2, variation = off(tokens, law(WARM))
    assert chi2 > 2
    assert variation > 2
    assert 0 < acceptance.proposed[0] < acceptance.num_rounds


def test_the_chance_of_acceptance_is_one_minus_the_distance() -> None:
    p_t, p_d, _ = models(WARM)
    _, acceptance = generated(WARM, lambda index, told, drafts: torch.full((len(drafts),), 1))
    first = float(torch.minimum(p_t[0], p_d[0]).sum())
    second = [float(torch.minimum(p_t[x], p_d[x]).sum()) for x in range(V)]
    assert min(first, *second) - 0.01 < acceptance.by_position[0] < max(first, *second) + 0.01


def test_all_outcomes_of_one_round_add_up() -> None:
    """No luck: every draft by its chance, and both uniforms over a grid."""
    p_t, p_d, _ = models(WARM)
    n = 300
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    x, u, v = (t.flatten() for t in torch.meshgrid(torch.arange(V).double(), grid, grid, indexing="ij"))
    x = x.long()
    both = torch.stack([p_t[0].expand(len(x), V), p_t[x]], dim=1)
    out = chain_accept(
        x[:, None],
        p_d[0].expand(len(x), 1, V),
        both,
        torch.ones_like(x),
        accept_noise=u[:, None],
        bonus_noise=torch.stack([v, v], dim=1),
    )
    law = torch.zeros(V, dtype=torch.float64).index_add(0, out.out_tokens[:, 0], p_d[0, x].double() / n**2)
    assert (law - p_t[0]).abs().max() < 2 / n


def test_the_identity_of_accept_length_is_asserted() -> None:
    counted = Acceptance.of_rounds([1, 3, 4, 2], [3, 3, 3, 1], block_size=3)
    assert counted.accepted == (1, 1, 1, 1)
    assert counted.proposed == (0, 1, 0, 3)
    assert counted.by_position == [0.75, 0.5, 0.25]
    assert counted.accept_length == 2.5
    with pytest.raises(ValueError, match=r"accept_length=2\.6 is not 1 \+ Σ P_k = 2\.5 over 4 rounds"):
        counted.check_identity(2.6)
    for accepts, proposals in itertools.product([[0], [3]], [[1]]):
        with pytest.raises(ValueError, match="of 1 verified drafts"):
            Acceptance.of_rounds(accepts, proposals, block_size=3)
