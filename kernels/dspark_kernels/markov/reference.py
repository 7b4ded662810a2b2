"""The sequential stage of a DSpark draft in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Step(NamedTuple):
    """One token a request."""

    tokens: Tensor
    """[B] int64."""
    corrected: Tensor | None
    """[B, V] base + bias, without temperature and noise; None where not asked for."""
    embedded: Tensor
    """[B, r] W1 of the tokens before."""


class Walk(NamedTuple):
    """A block of γ tokens a request."""

    tokens: Tensor
    """[B, γ] int64."""
    corrected: Tensor | None
    """[B, γ, V]; None where not asked for."""
    embedded: Tensor
    """[B, γ, r] W1 of each token's predecessor."""


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
    """``base`` [B, V], ``prev_tokens`` [B] int64, ``w1``, ``w2`` [V, r], ``noise`` [B, V] float32 to a `Step`."""
    embedded = F.embedding(prev_tokens, w1)
    corrected = base + F.linear(embedded, w2)
    scores = corrected if noise is None else corrected.float() / temperature + noise
    return Step(scores.argmax(dim=-1), corrected if with_corrected else None, embedded)


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
    """``base`` [B, γ, V], ``anchors`` [B] int64, ``w1``, ``w2`` [V, r], ``noise`` [B, γ, V] float32 to a `Walk`."""
    tokens, corrected, embedded, prev = [], [], [], anchors
    for k in range(base.shape[1]):
        step = markov_step(
            base[:, k],
            prev,
            w1,
            w2,
            noise=None if noise is None else noise[:, k],
            temperature=temperature,
            with_corrected=with_corrected,
        )
        prev = step.tokens
        tokens.append(prev)
        corrected.append(step.corrected)
        embedded.append(step.embedded)
    return Walk(
        torch.stack(tokens, dim=1),
        torch.stack(corrected, dim=1) if with_corrected else None,
        torch.stack(embedded, dim=1),
    )
