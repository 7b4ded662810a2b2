"""The small heads of a DSpark drafter: Markov heads correct logits by the token before, the confidence head says what survives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dspark_lab.config.parts import DrafterConfig
from dspark_lab.ep.groups import ONE_RANK, RankGroup
from dspark_lab.models.shards import column_linear, embedding, linear


class MarkovHead(nn.Module):
    """Vanilla: B = W1[x] W2, a low-rank bigram table added to the base logits.

    W2 is cut by vocabulary as the LM head is. W1 is whole on every rank: a lookup reads one row, and costs no collective.
    """

    def __init__(self, vocab_size: int, rank: int, tp: RankGroup = ONE_RANK, **factory: Any) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = embedding(vocab_size, rank, **factory)
        self.markov_w2 = column_linear(rank, vocab_size, tp, **factory)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1[x]: [..] int64 to [.., r]."""
        return self.markov_w1(tokens)

    def bias(self, embedded: Tensor) -> Tensor:
        """[.., r] to what is added to this rank's logits, [.., V_local]."""
        return self.markov_w2(embedded)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias [.., V_local] of one slot and the state for the next, from ``embedded`` [.., r] and ``hidden`` [.., H] of the slot.

        ``state`` [.., r] comes from the slot before; None at the first, and from heads that keep none.
        """
        return self.bias(embedded), None

    def block(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Biases [.., γ, V_local] of whole blocks whose tokens are known: ``embedded`` [.., γ, r], ``hidden`` [.., γ, H]."""
        return self.bias(embedded)


class GatedMarkovHead(MarkovHead):
    """B = (W1[x] ⊙ σ(W_g [h_k ; W1[x]] + b)) W2: the block's own hidden state says which of the bigram counts."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, tp: RankGroup = ONE_RANK, **factory: Any) -> None:
        super().__init__(vocab_size, rank, tp, **factory)
        self.gate_proj = linear(hidden_size + rank, rank, bias=True, **factory)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = self.gate_proj(torch.cat((hidden, embedded), dim=-1)).sigmoid()
        return self.bias(gate * embedded), None

    def block(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.step(embedded, hidden, None)[0]


class RnnMarkovHead(MarkovHead):
    """z = [s ; W1[x] ; h_k], (g, c, o) = W_j z + b, s ← σ(g)⊙s + (1 − σ(g))⊙tanh(c), B = tanh(o) W2; s starts at 0."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, tp: RankGroup = ONE_RANK, **factory: Any) -> None:
        super().__init__(vocab_size, rank, tp, **factory)
        self.joint_proj = linear(2 * rank + hidden_size, 3 * rank, bias=True, **factory)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
        keep = gate.sigmoid()
        return self.bias(output.tanh()), keep * state + (1 - keep) * candidate.tanh()

    def block(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        state, biases = None, []
        for e, h in zip(embedded.unbind(-2), hidden.unbind(-2), strict=True):
            bias, state = self.step(e, h, state)
            biases.append(bias)
        return torch.stack(biases, dim=-2)


def markov_head(
    drafter: DrafterConfig, vocab_size: int, hidden_size: int, tp: RankGroup = ONE_RANK, **factory: Any
) -> MarkovHead | None:
    """The head that ``drafter`` names; None at rank 0."""
    rank = drafter.markov_rank
    if not rank:
        return None
    if drafter.markov_head == "gated":
        return GatedMarkovHead(vocab_size, rank, hidden_size, tp, **factory)
    if drafter.markov_head == "rnn":
        return RnnMarkovHead(vocab_size, rank, hidden_size, tp, **factory)
    return MarkovHead(vocab_size, rank, tp, **factory)


class ConfidenceHead(nn.Module):
    """c_k = σ(w·[h_k ; W1[x_{k−1}]] + b): the chance that token k survives, given that all before it did."""

    def __init__(self, hidden_size: int, rank: int, **factory: Any) -> None:
        super().__init__()
        self.proj = linear(hidden_size + rank, 1, bias=True, **factory)

    def logits(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """``hidden`` [.., γ, H] and ``embedded`` [.., γ, r] (None: h alone) to float32 [.., γ], before the sigmoid."""
        features = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        return self.proj(features).squeeze(-1).float()

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """As `logits`, within 0 to 1."""
        return self.logits(hidden, embedded).sigmoid()
