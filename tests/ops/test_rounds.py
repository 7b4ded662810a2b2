"""`block_rows` and `accept_and_commit` against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dspark_kernels.accept.reference import Accepted
from dspark_kernels.rounds import accept_and_commit, block_rows, commit, kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DUMMY = 9


def state(b: int, seed: int = 0) -> dict[str, Tensor]:
    """Anchors, lengths, slots and limits; every third request takes no part."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 50, (b,), generator=g)
    limits = torch.where(torch.arange(b) % 3 == 2, lens, lens + 20)
    made = {
        "anchors": torch.randint(0, 100, (b,), generator=g),
        "seq_lens": lens,
        "slots": torch.randperm(b, generator=g),
        "limits": limits,
    }
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("b", "width"), [(1, 6), (5, 6), (3, 1), (17, 9)])
def test_rows(b: int, width: int, verify: bool) -> None:
    table = torch.arange(b * 20, device=DEVICE).view(b, 20)
    drafts = table[:, : width - 1] if verify else None  # strided
    args = {"width": width, "mask_token": 77, "dummy_slot": DUMMY}
    got, want = block_rows(*state(b).values(), drafts, **args), reference.block_rows(*state(b).values(), drafts, **args)
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert torch.equal(g, w), name
        assert g.is_contiguous(), name


def test_a_draft_block_by_hand() -> None:
    args = [torch.tensor(v, device=DEVICE) for v in ([5, 6], [10, 20], [1, 0], [11, 20])]
    got = block_rows(*args, None, width=3, mask_token=99, dummy_slot=DUMMY)
    assert got.input_ids.tolist() == [5, 99, 99, 6, 99, 99]
    assert got.positions.tolist() == [10, 11, 12, 0, 1, 2]
    assert got.key_limits.tolist() == [13, 13, 13, 3, 3, 3]
    assert got.req_slots.tolist() == [1, DUMMY]
    assert got.token_slots.tolist() == [1, 1, 1, DUMMY, DUMMY, DUMMY]
    drafts = torch.tensor([[7, 8], [3, 4]], device=DEVICE)
    got = block_rows(*args, drafts, width=3, mask_token=99, dummy_slot=DUMMY)
    assert got.input_ids.tolist() == [5, 7, 8, 6, 3, 4]
    assert got.key_limits.tolist() == [11, 12, 13, 1, 2, 3]


def ring(depth: int, b: int, gamma: int) -> Tensor:
    """[depth, b, γ + 4], cut from more rows; on a GPU in the host's memory."""
    return torch.full((depth, b + 2, gamma + 4), -5, pin_memory=DEVICE == "cuda")[:, :b]


def done() -> None:
    """What a kernel writes to the host's memory is there when it is over."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(("b", "gamma"), [(1, 5), (4, 5), (33, 5), (3, 0)])
def test_commit(b: int, gamma: int, simulated: bool) -> None:
    g = torch.Generator().manual_seed(b)
    # Mostly equal tokens, so that every number of accepted drafts comes up.
    drafts = torch.randint(0, 4, (b, gamma), generator=g).to(DEVICE)
    target = torch.where(
        torch.rand(b, gamma + 1, generator=g).to(DEVICE) < 0.7, torch.nn.functional.pad(drafts, (0, 1)), 9
    )
    lengths = torch.randint(0, gamma + 1, (b,), generator=g).to(DEVICE)
    draws = torch.randint(0, 8, (3, b + 2), generator=g).to(DEVICE) if simulated else None
    sides = []
    for op in (accept_and_commit, reference.accept_and_commit):
        s = state(b)
        packed = torch.full((b, gamma + 3), -5, device=DEVICE)
        rounds = torch.tensor([4], device=DEVICE)
        results = ring(3, b, gamma)
        own = results if op is accept_and_commit else results.to(DEVICE)
        args = (drafts, lengths, target, *s.values(), packed, draws, rounds)
        slots = op(*args, dummy_slot=DUMMY, results=own)
        done()
        sides.append({**s, "packed": packed, "rounds": rounds, "context slots": slots, "results": own.to(DEVICE)})
    for name, want in sides[1].items():
        assert torch.equal(sides[0][name], want), name


@pytest.mark.parametrize("stops", [(), (3,), (9, 0, 77)])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(("b", "gamma"), [(1, 5), (19, 4), (3, 0)])
def test_stop_tokens_and_other_acceptance(b: int, gamma: int, drawn: bool, stops: tuple[int, ...]) -> None:
    """Greedy acceptance with stop tokens, and a commit of what another rule accepted."""
    g = torch.Generator().manual_seed(b)
    tokens = torch.randint(0, 5, (b, gamma + 1), generator=g).to(DEVICE)
    lengths = torch.full((b,), gamma, device=DEVICE)
    kept = torch.randint(0, gamma + 1, (b,), generator=g).to(DEVICE)
    bonus, column = tokens.gather(1, kept[:, None]).squeeze(1), torch.arange(gamma + 1, device=DEVICE)
    drafts = torch.nn.functional.pad(tokens[:, :gamma], (0, 1))
    accepted = Accepted(kept, bonus, torch.where(column == kept[:, None], bonus[:, None], drafts))
    stop_ids = torch.tensor(stops, device=DEVICE) if stops else None
    sides = []
    for side in (0, 1):
        s, packed, rounds = state(b), torch.full((b, gamma + 3), -5, device=DEVICE), torch.tensor([7], device=DEVICE)
        results = ring(2, b, gamma)
        own = results if side == 0 else results.to(DEVICE)
        how = {"dummy_slot": DUMMY, "results": own, "stop_ids": stop_ids}
        if drawn:
            op = commit if side == 0 else reference.commit
            slots = op(accepted, lengths, *s.values(), packed, rounds, **how)
        else:
            op = accept_and_commit if side == 0 else reference.accept_and_commit
            slots = op(tokens[:, :gamma], lengths, tokens, *s.values(), packed, None, rounds, **how)
        done()
        sides.append({**s, "packed": packed, "rounds": rounds, "slots": slots, "results": own.to(DEVICE)})
    for name, want in sides[1].items():
        assert torch.equal(sides[0][name], want), name
    if len(stops) > 1 and b > 3:
        assert (sides[0]["limits"] == 0).any()


def test_commit_by_hand() -> None:
    """Two of three drafts hold, then the bonus; the second request takes no part."""
    s = {n: torch.tensor(v, device=DEVICE) for n, v in (("a", [1, 2]), ("l", [10, 20]), ("s", [3, 4]), ("m", [30, 20]))}
    drafts = torch.tensor([[7, 8, 9], [7, 8, 9]], device=DEVICE)
    target = torch.tensor([[7, 8, 5, 6], [7, 8, 9, 6]], device=DEVICE)
    packed, rounds = (
        torch.zeros(2, 6, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    lengths = torch.tensor([3, 3], device=DEVICE)
    results = ring(2, 2, 3)
    slots = accept_and_commit(
        drafts, lengths, target, *s.values(), packed, None, rounds, dummy_slot=DUMMY, results=results
    )
    assert s["a"].tolist() == [5, 2]
    assert s["l"].tolist() == [13, 20]
    assert packed[0].tolist() == [7, 8, 5, 0, 3, 3]
    assert packed[1, 4:].tolist() == [0, 3]
    assert slots.tolist() == [3, 3, 3, DUMMY] + [DUMMY] * 4
    assert rounds.tolist() == [1]
    assert results[0].tolist() == [[7, 8, 5, 0, 3, 3, 0], [*packed[1].tolist(), 0]]
    assert results[1].eq(-5).all()


def test_each_round_has_its_own_place_among_the_results() -> None:
    s, results, rounds = state(1), ring(3, 1, 1), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    packed = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    lengths, drafts = (
        torch.ones(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, 1, dtype=torch.int64, device=DEVICE),
    )
    for n in range(5):
        target = torch.tensor([[0, 40 + n]], device=DEVICE)
        args = (drafts, lengths, target, *s.values(), packed, None, rounds)
        accept_and_commit(*args, dummy_slot=DUMMY, results=results)
    done()
    assert [row[0, 1:].tolist() for row in results] == [[40 + n, 2, 1, n] for n in (3, 4, 2)]


def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "block_rows", lambda *args, **kwargs: "kernel")
    assert block_rows(*state(2).values(), None, width=3, mask_token=0, dummy_slot=DUMMY) == "kernel"


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"drafts \[B, 5\]"):
        block_rows(*state(2).values(), torch.zeros(2, 4, device=DEVICE), width=6, mask_token=0, dummy_slot=DUMMY)
    drafts, packed = torch.zeros(2, 3, device=DEVICE), torch.zeros(2, 6, device=DEVICE)
    with pytest.raises(ValueError, match="target_tokens"):
        accept_and_commit(drafts, drafts[:, 0], drafts, *state(2).values(), packed, None, drafts[0], dummy_slot=DUMMY)
    target, short = torch.zeros(2, 4, device=DEVICE), ring(3, 2, 2)
    with pytest.raises(ValueError, match=r"results \(3, 2, 6\) must be \[rounds, 2, 7\]"):
        accept_and_commit(
            drafts, drafts[:, 0], target, *state(2).values(), packed, None, drafts[0], dummy_slot=DUMMY, results=short
        )
