"""Sampling kernels against their references: the same numbers, the same kept sets, the same tokens but at a border of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from dspark_kernels.sampling import chain_accept_logits, kernel, reference, sample, uniforms
from dspark_kernels.sampling.reference import ACCEPT, BONUS, SamplingRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = 2**62
# temperature, top_k, top_p; temperature 0 is greedy
SETTINGS = [
    (1.0, ALL, 1.0),
    (0.0, ALL, 1.0),
    (0.6, 3, 1.0),
    (1.3, ALL, 0.7),
    (0.9, 40, 0.6),
    (2.0, 1, 1.0),
    (1.0, 7, 0.05),
    (1.0, 2, 0.999),
]


def rows_of(settings: list[tuple[float, int, float]]) -> SamplingRows:
    t, k, p = zip(*settings, strict=True)
    return SamplingRows(
        temperature=torch.tensor(t, dtype=torch.float32, device=DEVICE), top_k=torch.tensor(k, device=DEVICE),
        top_p=torch.tensor(p, dtype=torch.float32, device=DEVICE), is_greedy=torch.tensor([x == 0 for x in t], device=DEVICE),
        all_greedy=False, cuts=any(k < ALL or p < 1 for _, k, p in settings),
    )  # fmt: skip


def logits_of(b: int, vocab: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(b, vocab, generator=g) * scale).to(dtype).to(DEVICE)


def noise_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def test_numbers_are_the_same_bits() -> None:
    requests = torch.tensor([0, 7, 2**40 + 3, 2**33], device=DEVICE)
    anchors = torch.tensor([0, 100, 5, 2**31 + 9], device=DEVICE)
    for seed in (0, 1, 11, 2**33 + 5):
        for slots in (1, 6, 8):
            assert torch.equal(
                uniforms(seed, requests, anchors, slots), reference.uniforms(seed, requests, anchors, slots)
            )


def agree(got: Tensor, want: Tensor, probs: Tensor, noise: Tensor) -> None:
    """Equal tokens, or neighbours whose border the number hits within float32's rounding."""
    ends = probs.double().cumsum(-1)
    for i in range(len(got)):
        a, b = sorted((int(got[i]), int(want[i])))
        assert a == b or abs(float(ends[i, a] / ends[i, -1] - noise[i])) < 2e-6, (i, a, b)
        assert probs[i, got[i]] > 0


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(7, torch.float32), (5000, torch.float32), (9001, torch.bfloat16)],
)
def test_a_mixed_batch(vocab: int, dtype: torch.dtype, cuts: bool) -> None:
    settings = SETTINGS if cuts else [(t, ALL, 1.0) for t, _, _ in SETTINGS]
    rows, logits, noise = rows_of(settings), logits_of(len(settings), vocab, dtype), noise_of(len(settings))
    probs = torch.full((len(settings), 2, vocab), -1.0, device=DEVICE)
    got = sample(logits, rows, noise, probs[:, 1])  # strided
    want = reference.probabilities(logits, rows)
    assert torch.equal(probs[:, 1] > 0, want > 0)
    torch.testing.assert_close(probs[:, 1], want, rtol=2e-5, atol=1e-9)
    assert (probs[:, 0] == -1).all()
    agree(got, reference.draw(want, noise), want, noise)


def test_equals_keep_the_lower_ids() -> None:
    """Half of the vocabulary shares the logit at which top-k, top-p and both cut."""
    logits = torch.where(torch.arange(3000, device=DEVICE) % 2 == 0, 1.0, -2.0).expand(4, -1).contiguous()
    logits[:, 1501] = 4.0
    rows = rows_of([(1.0, 100, 1.0), (1.0, ALL, 0.3), (1.0, 700, 0.5), (1.0, ALL, 0.9999)])
    probs = torch.empty_like(logits)
    sample(logits, rows, noise_of(4), probs)
    want = reference.probabilities(logits, rows)
    for got, wanted in zip(probs, want, strict=True):
        kept, expected = int((got > 0).sum()), int((wanted > 0).sum())
        assert abs(kept - expected) <= 1  # the mass of the border, in float32
        assert (
            (got > 0)
            .nonzero()
            .flatten()[: min(kept, expected) - 1]
            .equal((wanted > 0).nonzero().flatten()[: min(kept, expected) - 1])
        )
    assert (probs[0] > 0).sum() == 100


def test_draws_follow_the_distribution() -> None:
    b, vocab = 80 if DEVICE == "cpu" else 4000, 11
    rows, logits = (
        rows_of([(0.8, ALL, 1.0)] * b),
        logits_of(1, vocab, torch.float32, scale=1.5).expand(b, -1).contiguous(),
    )
    counts = torch.bincount(sample(logits, rows, noise_of(b)), minlength=vocab)
    wanted = reference.probabilities(logits[:1], rows_of([(0.8, ALL, 1.0)]))[0] * b
    assert ((counts - wanted) ** 2 / wanted).sum() < 35  # 10 degrees of freedom: p < 2e-4


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("vocab", "gamma", "cuts"), [(9, 3, True), (300, 7, False), (4500, 1, True), (50, 1, False), (64, 0, True)]
)
def test_acceptance(vocab: int, gamma: int, cuts: bool, compact: bool) -> None:
    b, w = 8 if DEVICE == "cuda" or not cuts else 5, gamma + 1
    rows = rows_of((SETTINGS if cuts else [(t, ALL, 1.0) for t, _, _ in SETTINGS])[:b])
    target = logits_of(b * w, vocab, torch.bfloat16 if cuts else torch.float32, seed=3, scale=1.0)
    draft = target.float().view(b, w, vocab)[:, :gamma] + logits_of(
        b * gamma, vocab, torch.float32, seed=4, scale=0.5
    ).view(b, gamma, vocab)
    p_d = reference.probabilities(draft, rows) if gamma else torch.zeros(b, 0, vocab, device=DEVICE)
    drafts = reference.draw(p_d, noise_of(b, gamma, seed=5))
    lengths = torch.tensor([gamma, gamma, 0, 1, gamma, 2, gamma, 3], device=DEVICE).clamp(max=gamma)[:b]
    noise = {
        "accept_noise": noise_of(b, w, 3, seed=6)[:, :gamma, ACCEPT],
        "bonus_noise": noise_of(b, w, 3, seed=7)[..., BONUS],
    }
    logits, where = target, None
    if compact:  # the rows that are verified, in another order, and a spare one
        places = [r * w + k for r in range(b) for k in range(int(lengths[r]) + 1)][::-1]
        logits = torch.cat([target[places], torch.full((2, vocab), float("nan"), device=DEVICE)])
        where = torch.full((b * w,), len(logits), device=DEVICE)
        where[places] = torch.arange(len(places), device=DEVICE)
    got = chain_accept_logits(drafts, p_d, logits, rows, lengths, row_of_place=where, **noise)
    want = reference.chain_accept_logits(drafts, p_d, logits, rows, lengths, row_of_place=where, **noise)
    assert torch.equal(got.num_accepted, want.num_accepted)
    assert torch.equal(got.out_tokens, want.out_tokens)
    assert torch.equal(got.bonus, want.bonus)
    if gamma > 2:
        assert len(set(want.num_accepted.tolist())) > 2


def test_a_block_that_is_certain_passes_whole() -> None:
    """Equal distributions: nothing is refused, and the residual, which has no mass, is not drawn from."""
    rows, logits = rows_of([(1.0, ALL, 1.0)] * 2), logits_of(8, 33, torch.float32)
    p = reference.probabilities(logits.view(2, 4, 33), rows)
    drafts = reference.draw(p[:, :3], noise_of(2, 3))
    got = chain_accept_logits(
        drafts, p[:, :3].contiguous(), logits, rows, torch.full((2,), 3, device=DEVICE), accept_noise=noise_of(2, 3) * 0.99,
        bonus_noise=noise_of(2, 4),
    )  # fmt: skip
    assert got.num_accepted.tolist() == [3, 3]


def test_padded_rows_may_hold_anything() -> None:
    rows, logits = (
        rows_of([(1.0, 5, 0.9), (0.0, ALL, 1.0), (1.0, ALL, 1.0)]),
        torch.full((3, 300), float("nan"), device=DEVICE),
    )
    tokens = sample(logits, rows, noise_of(3), torch.empty(3, 300, device=DEVICE))
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_the_kernels_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "sample", lambda *args: "kernel")
    for rows, vocab, runs in ((4, 70_000, False), (5, 70_000, True), (1, 65_536, True)):
        made = sample(torch.zeros(rows, vocab, device=DEVICE), rows_of([(1.0, 2, 1.0)] * rows), noise_of(rows))
        assert (made == "kernel") is runs
    assert sample(torch.zeros(1, 4, device=DEVICE), rows_of([(1.0, ALL, 1.0)]), noise_of(1)) == "kernel"
    assert (
        sample(torch.zeros(1, 4, dtype=torch.float64, device=DEVICE), rows_of([(1.0, ALL, 1.0)]), noise_of(1)).tolist()
        != "kernel"
    )


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="temperature"):
        sample(torch.zeros(2, 4, device=DEVICE), rows_of([(1.0, ALL, 1.0)]), noise_of(2))
    with pytest.raises(ValueError, match="contiguous vocabulary"):
        sample(torch.zeros(4, 2, device=DEVICE).t(), rows_of([(1.0, ALL, 1.0)] * 2), noise_of(2))
