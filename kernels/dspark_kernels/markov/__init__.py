"""The sequential stage of a DSpark draft: low-rank bigram bias, sum and argmax over a large vocabulary, γ times."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.markov import reference
from dspark_kernels.markov.reference import Step, Walk


def markov_step(
    base: Tensor,
    prev_tokens: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    noise: Tensor | None = None,
    temperature: float = 1.0,
    with_corrected: bool = False,
) -> Step:
    """One token a request: argmax of corrected = ``base`` [B, V] + W1[``prev_tokens``] W2ᵀ (``w1``, ``w2`` [V, r]).

    With Gumbel ``noise`` [B, V] float32 the token is a draw of softmax(corrected / temperature): argmax of corrected /
    temperature + noise. The lowest index wins among equals, as in torch.argmax; NaN never wins on the Triton path (a row of
    NaN gives token 0), and a predecessor outside the vocabulary counts as a row of zeros. Rounds where torch rounds: the bias
    and the sum, to the dtype. Triton on CUDA and in its interpreter, plain torch elsewhere.
    """
    if on_triton(base):
        from dspark_kernels.markov import kernel

        step = kernel.markov_step
    else:
        step = reference.markov_step
    return step(base, prev_tokens, w1, w2, noise=noise, temperature=temperature, with_corrected=with_corrected)


def markov_walk(
    base: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    noise: Tensor | None = None,
    temperature: float = 1.0,
    with_corrected: bool = False,
) -> Walk:
    """γ steps, each from the token before: ``base`` [B, γ, V], ``anchors`` [B] int64, ``noise`` [B, γ, V] float32 or None.

    Nothing waits for the host, so that the whole walk may lie in a captured graph. Logits are stored only
    ``with_corrected``. See `markov_step` for the rest.
    """
    if on_triton(base):
        from dspark_kernels.markov import kernel

        walk = kernel.markov_walk
    else:
        walk = reference.markov_walk
    return walk(base, anchors, w1, w2, noise=noise, temperature=temperature, with_corrected=with_corrected)


__all__ = ["markov_step", "markov_walk", "Step", "Walk"]
