"""Temperature, top-k and top-p against loops by hand; draws by the inverse of the cumulative sum."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_kernels.sampling.reference import draw, probabilities, uniforms
from dspark_lab.errors import LabError
from dspark_lab.spec.sampling import Sampling, sampling_rows


def by_loops(logits: list[float], s: Sampling) -> list[float]:
    """One row, token by token."""
    if s.is_greedy:
        return [float(v == logits.index(max(logits))) for v in range(len(logits))]
    weights = [math.exp(x / s.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    kept = order[: s.top_k or len(order)]
    mass = sum(weights[v] for v in kept)
    chosen, total = [], 0.0
    for v in kept:
        if total >= s.top_p and s.top_p < 1:
            break
        chosen.append(v)
        total += weights[v] / mass
    return [weights[v] / sum(weights[c] for c in chosen) if v in chosen else 0.0 for v in range(len(weights))]


SETTINGS = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.6, top_k=3),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(temperature=0.9, top_k=4, top_p=0.6),
    Sampling(temperature=2.0, top_k=1),
    Sampling(top_k=99, top_p=0.05),
]


def test_a_mixed_batch_against_loops() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(SETTINGS), 3, 8, dtype=torch.float64) * 2
    logits[:, 1, 4] = logits[:, 1, 2]  # equals: the lower id is kept
    made = probabilities(logits, sampling_rows(SETTINGS))
    for b, setting in enumerate(SETTINGS):
        for k in range(3):
            wanted = by_loops(logits[b, k].tolist(), setting)
            assert made[b, k].tolist() == pytest.approx(wanted, abs=1e-6), setting.label
    assert torch.equal(probabilities(logits[:, 0], sampling_rows(SETTINGS)), made[:, 0])


def test_rows_do_not_depend_on_their_batch() -> None:
    logits = torch.randn(len(SETTINGS), 2, 8)
    made = probabilities(logits, sampling_rows(SETTINGS))
    assert made.dtype == torch.float32
    for b, setting in enumerate(SETTINGS):
        assert torch.allclose(probabilities(logits[b : b + 1], sampling_rows([setting]))[0], made[b], atol=1e-6)


def test_one_token_kept_is_greedy_and_never_called_sampling() -> None:
    assert Sampling(temperature=0.8, top_k=1).is_greedy
    assert Sampling(temperature=0.8, top_k=1).label == "greedy (top_k=1 at temperature 0.8)"
    assert Sampling(temperature=0).label == "greedy"
    assert Sampling(temperature=0.8, top_k=5, top_p=0.9).label == "sampling at temperature 0.8, top_k=5, top_p=0.9"


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": 1e-9},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.1},
    ],
)
def test_settings_that_are_none_are_refused(bad) -> None:
    with pytest.raises(LabError, match=f"{next(iter(bad))}="):
        Sampling(**bad)


def test_a_draw_inverts_the_cumulative_sum() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]]).expand(4, 5)
    assert draw(weights, torch.tensor([0.0, 0.2499, 0.25, 1 - 2.0**-33], dtype=torch.float64)).tolist() == [1, 1, 3, 3]


def test_draws_have_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    noise = uniforms(0, torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64), 1)[:, 0, 0]
    share = torch.bincount(draw(probs.expand(40_000, 4), noise), minlength=4) / 40_000
    assert share[1] == 0
    assert (share - probs).abs().max() < 0.01
