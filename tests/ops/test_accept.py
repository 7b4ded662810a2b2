"""Argmax of rows and greedy acceptance against the reference, and against the rule token by token."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.accept import argmax_rows, greedy_accept, greedy_accept_logits, reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "vocab"), [(1, 33), (1, 9001), (6, 4096), (40, 2049)])
def test_argmax_agrees_with_torch(dtype: torch.dtype, n: int, vocab: int) -> None:
    x = torch.randn(n, vocab, device=DEVICE).to(dtype)  # float16 has ties of its own
    assert torch.equal(argmax_rows(x), x.argmax(dim=-1))


def test_argmax_takes_the_lowest_of_equals_and_never_nan() -> None:
    x = torch.zeros(5, 9001, device=DEVICE)
    x[1, [7, 8, 2500, 9000]] = 1.0
    x[2, 9000] = 1.0
    x[3] = float("nan")
    x[4] = float("-inf")
    assert argmax_rows(x).tolist() == [0, 7, 9000, 0, 0]
    x[1, 3] = float("nan")
    assert argmax_rows(x).tolist()[1] == 7


def test_equals_within_one_part_of_a_row() -> None:
    """Rows so long that a program meets a column more than once, on any GPU."""
    x = torch.zeros(8, 300_000, device=DEVICE)
    x[1, 4097:] = 1.0
    assert argmax_rows(x).tolist() == [0, 4097, 0, 0, 0, 0, 0, 0]


def test_argmax_of_strided_rows() -> None:
    x = torch.randn(4, 300, device=DEVICE)[:, :200]
    assert torch.equal(argmax_rows(x), x.argmax(dim=-1))


def accepted(b: int, gamma: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts that agree with the target up to a random place, and proposals of any length."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 50, (b, gamma + 1), generator=g)
    draft = target[:, :gamma].clone()
    draft[torch.rand(b, gamma, generator=g) < 0.25] += 1
    return draft.to(DEVICE), target.to(DEVICE), torch.randint(0, gamma + 1, (b,), generator=g).to(DEVICE)


@pytest.mark.parametrize(("b", "gamma"), [(1, 5), (3, 1), (8, 7), (16, 4)])
@pytest.mark.parametrize("whole", [True, False])
def test_accepts_as_the_rule_says(b: int, gamma: int, whole: bool) -> None:
    for seed in range(4):
        draft, target, proposal = accepted(b, gamma, seed)
        if whole:
            proposal.fill_(gamma)
        got = greedy_accept(draft, target, proposal)
        for row, (d, t, most) in enumerate(zip(draft.tolist(), target.tolist(), proposal.tolist(), strict=True)):
            kept = 0
            while kept < most and d[kept] == t[kept]:
                kept += 1
            assert int(got.num_accepted[row]) == kept
            assert int(got.bonus[row]) == t[kept]
            assert got.out_tokens[row, : kept + 1].tolist() == [*d[:kept], t[kept]]
        for a, b_ in zip(got, reference.greedy_accept(draft, target, proposal), strict=True):
            assert torch.equal(a, b_)


def test_none_and_all_accepted() -> None:
    target = torch.tensor([[4, 5, 6], [4, 5, 6]], device=DEVICE)
    draft = torch.tensor([[9, 5], [4, 5]], device=DEVICE)
    got = greedy_accept(draft, target, torch.tensor([2, 2], device=DEVICE))
    assert got.num_accepted.tolist() == [0, 2]
    assert got.bonus.tolist() == [4, 6]
    assert got.out_tokens.tolist() == [[4, 5, 0], [4, 5, 6]]


def test_forced_numbers_are_capped() -> None:
    draft, target, proposal = accepted(6, 5, 0)
    forced = torch.tensor([0, 1, 2, 3, 9, 5], device=DEVICE)
    got, want = (f(draft, target, proposal, forced=forced) for f in (greedy_accept, reference.greedy_accept))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("b", "gamma", "vocab"), [(1, 5, 5000), (3, 2, 100)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_logits(b: int, gamma: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(b * (gamma + 1), vocab, device=DEVICE).to(dtype)
    draft = logits.argmax(dim=-1).view(b, -1)[:, :gamma].clone()
    draft[-1, -1] += 1
    proposal = torch.full((b,), gamma, device=DEVICE)
    got, want = (f(draft, logits, proposal) for f in (greedy_accept_logits, reference.greedy_accept_logits))
    for a, b_ in zip(got, want, strict=True):
        assert torch.equal(a, b_)


def test_strided_drafts() -> None:
    draft, target, proposal = accepted(4, 4, 1)
    block = torch.cat((target[:, :1], draft), dim=1)  # anchors beside drafts, as verified
    got, want = greedy_accept(block[:, 1:], target, proposal), reference.greedy_accept(draft, target, proposal)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_bad_shapes_are_named() -> None:
    draft, target, proposal = accepted(2, 3, 0)
    with pytest.raises(ValueError, match="4 verified rows"):
        greedy_accept(draft, target[:, :3], proposal)
    with pytest.raises(ValueError, match="4 verified rows"):
        greedy_accept_logits(draft, torch.zeros(7, 20, device=DEVICE), proposal)


def test_lengths_may_be_views() -> None:
    draft, target, proposal = accepted(4, 4, 1)
    beside = torch.stack((proposal, proposal * 0), dim=1)[:, 0]
    forced = torch.full((1,), 2, device=DEVICE).expand(4)
    got = greedy_accept(draft, target, beside, forced=forced)
    for a, b in zip(got, reference.greedy_accept(draft, target, proposal, forced=forced), strict=True):
        assert torch.equal(a, b)
