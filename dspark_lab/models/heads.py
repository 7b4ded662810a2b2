"""The two small heads of a DSpark drafter: the Markov head corrects logits, the confidence head says what survives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.models.shards import column_linear, embedding, linear


class MarkovHead(nn.Module):
    """Vanilla: B = W1[x] W2, a low-rank bigram table added to the base logits.

    W2 is cut by vocabulary as the LM head is. W1 is whole on every rank: a lookup reads one row, and costs no collective.
    """

    def __init__(self, vocab_size: int, rank: int, tp: RankGroup = ONE_RANK, **factory: Any) -> None:
        super().__init__()
        self.markov_w1 = embedding(vocab_size, rank, **factory)
        self.markov_w2 = column_linear(rank, vocab_size, tp, **factory)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1[x]: [..] int64 to [.., r]."""
        return self.markov_w1(tokens)

    def bias(self, embedded: Tensor) -> Tensor:
        """[.., r] to what is added to this rank's logits, [.., V_local]."""
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
