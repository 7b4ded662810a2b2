"""The two small heads of a DSpark drafter: the Markov head corrects logits, the confidence head says what survives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.models.attention import embedding, linear


class MarkovHead(nn.Module):
    """Vanilla: B = W1[x] W2, a low-rank bigram table added to the base logits."""

    def __init__(self, vocab_size: int, rank: int, **factory: Any) -> None:
        super().__init__()
        self.markov_w1 = embedding(vocab_size, rank, **factory)
        self.markov_w2 = linear(rank, vocab_size, **factory)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1[x]: [..] int64 to [.., r]."""
        return self.markov_w1(tokens)

    def bias(self, embedded: Tensor) -> Tensor:
        """[.., r] to what is added to the logits, [.., V]."""
        return self.markov_w2(embedded)


class ConfidenceHead(nn.Module):
    """c_k = σ(w·[h_k ; W1[x_{k−1}]] + b): the chance that token k survives, given that all before it did."""

    def __init__(self, hidden_size: int, rank: int, **factory: Any) -> None:
        super().__init__()
        self.proj = linear(hidden_size + rank, 1, bias=True, **factory)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """``hidden`` [B, γ, H] and ``embedded`` [B, γ, r] (None: h alone) to float32 [B, γ] within 0 to 1."""
        features = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        return self.proj(features).squeeze(-1).float().sigmoid()
