"""The sequential stage against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels.markov import Walk, markov_step, markov_walk, reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
NAN = float("nan")


def make(dtype: torch.dtype, b: int, gamma: int, vocab: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Base logits, anchors, W1, W2; the bias is as large as the logits, so that a wrong predecessor shows."""
    g = torch.Generator().manual_seed(b * 1000 + vocab)
    base = torch.randn(b, gamma, vocab, generator=g).to(DEVICE, dtype)
    w1, w2 = (torch.randn(vocab, rank, generator=g).div(rank**0.25).to(DEVICE, dtype) for _ in range(2))
    return base, torch.randint(0, vocab, (b,), generator=g).to(DEVICE), w1, w2


def agrees(got: Walk, base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> None:
    """Tokens are the argmax of the corrected logits, to the bit; those are the reference's along the same tokens."""
    assert got.corrected is not None
    assert torch.equal(got.tokens, got.corrected.argmax(dim=-1))
    previous = torch.cat((anchors[:, None], got.tokens[:, :-1]), dim=1)
    assert torch.equal(got.embedded, w1[previous])
    want = base + torch.nn.functional.linear(w1[previous], w2)
    eps = torch.finfo(base.dtype).eps
    torch.testing.assert_close(got.corrected, want, rtol=4 * eps, atol=max(4 * eps, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("b", "gamma", "vocab", "rank"),
    [(1, 5, 333, 24), (3, 4, 1000, 48), (8, 3, 256, 16), (9, 2, 300, 64), (40, 2, 130, 16)],
)
@pytest.mark.parametrize("fused", [True, False])
def test_walk_agrees_with_reference(dtype: torch.dtype, b: int, gamma: int, vocab: int, rank: int, fused: bool) -> None:
    from dspark_kernels.markov import kernel

    case = make(dtype, b, gamma, vocab, rank)
    agrees(kernel.markov_walk(*case, with_corrected=True, fused=fused), *case)
    if dtype == torch.float32:
        assert torch.equal(markov_walk(*case).tokens, reference.markov_walk(*case).tokens)


@pytest.mark.parametrize("b", [1, 3, 9])
def test_noise_draws_as_the_reference(b: int) -> None:
    case = make(torch.float32, b, 3, 333, 24)
    noise = -torch.empty(b, 3, 333, device=DEVICE).exponential_().log()
    for temperature in (0.5, 2.0):
        got = markov_walk(*case, noise=noise, temperature=temperature)
        assert torch.equal(got.tokens, reference.markov_walk(*case, noise=noise, temperature=temperature).tokens)
        assert got.corrected is None
    cold = markov_walk(*case, noise=noise, temperature=1e-6)
    assert torch.equal(cold.tokens, markov_walk(*case).tokens)
    hot = markov_walk(*case, noise=noise, temperature=1e6)
    assert torch.equal(hot.tokens, noise.argmax(dim=-1))


def test_step_is_a_walk_of_one() -> None:
    base, anchors, w1, w2 = make(torch.float32, 3, 2, 333, 24)
    got, want = (f(base[:, 1], anchors, w1, w2, with_corrected=True) for f in (markov_step, reference.markov_step))
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.embedded, want.embedded)
    torch.testing.assert_close(got.corrected, want.corrected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("b", [1, 9])
def test_the_lowest_index_wins_a_tie(b: int) -> None:
    """Between tiles, within one, in reverse (odd steps), and in a row of equals."""
    base, anchors, w1, w2 = make(torch.float32, b, 4, 1111, 16)
    w2.zero_()
    base[:, :2, [3, 5, 600, 1110]] = 9.0
    base[:, 2:] = 0.0
    assert markov_walk(base, anchors, w1, w2).tokens.tolist() == [[3, 3, 0, 0]] * b


@pytest.mark.parametrize("b", [2, 9])
def test_poison_stays_in_its_row(b: int) -> None:
    """NaN logits and a token of no vocabulary in the last, padded row: valid tokens there, nothing elsewhere."""
    case = make(torch.float32, b, 4, 333, 24)
    want = markov_walk(*case).tokens[:-1]
    base, anchors, w1, w2 = case
    base[-1], anchors[-1] = NAN, 10**12
    got = markov_walk(base, anchors, w1, w2)
    assert torch.equal(got.tokens[:-1], want)
    assert got.tokens[-1].tolist() == [0, 0, 0, 0]
    base[-1] = float("-inf")
    assert markov_walk(base, anchors, w1, w2).tokens[-1].tolist() == [0, 0, 0, 0]


def test_tiles_change_nothing() -> None:
    from dspark_kernels.markov import kernel

    case = make(torch.float32, 3, 3, 700, 16)
    want = kernel.markov_walk(*case).tokens
    for tiles in ({"PROGRAMS": 1}, {"BLOCK_V": 16, "PROGRAMS": 7}, {"BLOCK_B": 32}):
        assert torch.equal(kernel.markov_walk(*case, tiles=tiles).tokens, want)


def test_bad_shapes_are_named() -> None:
    base, anchors, w1, w2 = make(torch.float32, 2, 2, 64, 16)
    with pytest.raises(ValueError, match="belong together"):
        markov_walk(base, anchors, w1[:32], w2)
    with pytest.raises(ValueError, match="share a dtype"):
        markov_walk(base.half(), anchors, w1, w2)
    with pytest.raises(ValueError, match="temperature=0"):
        markov_walk(base, anchors, w1, w2, noise=torch.zeros_like(base), temperature=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("b", [1, 8, 128])
def test_large_vocabulary_in_a_graph(b: int) -> None:
    base, anchors, w1, w2 = make(torch.bfloat16, b, 5, 151_936, 256)
    markov_walk(base, anchors, w1, w2, with_corrected=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = markov_walk(base, anchors, w1, w2, with_corrected=True)
    for _ in range(2):
        base.normal_()
        anchors.random_(0, 151_936)
        graph.replay()
        # W2 is read in bf16, so nothing but the order of sums differs, and with it single roundings.
        assert out.corrected is not None
        assert torch.equal(out.tokens, out.corrected.argmax(dim=-1))
        previous = torch.cat((anchors[:, None], out.tokens[:, :-1]), dim=1)
        assert torch.equal(out.embedded, w1[previous])
        for k in range(5):
            want = base[:, k].float() + out.embedded[:, k].float() @ w2.float().t()
            torch.testing.assert_close(out.corrected[:, k].float(), want, rtol=2e-2, atol=6e-2)
