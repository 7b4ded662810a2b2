"""What a drafter would accept on text that the target itself drew: exact given the text, without a decode loop.

Given that chain sampling commits x_i, the draft was accepted with probability min(1, p_d(x_i) / p_t(x_i)), independently of the
rest of the text. So the chance that a round started at p accepts k tokens is a product over the text, and the expected number
of rounds that start at each position follows from that of the positions before it. Temperature 1 on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.plan.rehearsal import TextPath
from dspark_lab.train.anchors import Anchors, label_positions
from dspark_lab.train.blocks import block_forward
from dspark_lab.train.forward import causal_forward


@dataclass(frozen=True, kw_only=True)
class PathAcceptance:
    """Expected rounds over one or several texts; lists can be added up."""

    num_rounds: float
    num_tokens: float
    """Committed by these rounds, bonus tokens included."""
    accepted: tuple[float, ...]
    """Expected rounds that accepted draft token k, k = 1..γ."""

    @property
    def accept_length(self) -> float:
        """Tokens a round, bonus included: 1 + Σ_k P_k."""
        return self.num_tokens / self.num_rounds

    @property
    def by_position(self) -> list[float]:
        """P_k: share of rounds that accepted draft token k."""
        return [a / self.num_rounds for a in self.accepted]


def path_acceptance(
    target: Target, drafter: Drafter | EagleDrafter, tokens: Tensor, prompt_len: int
) -> list[PathAcceptance]:
    """Of each row of ``tokens`` [B, S], drawn from ``target`` behind the first ``prompt_len``; the first token is the first anchor.

    Rounds that could reach past the end are not counted.
    """
    return [_walk(text.survival) for text in text_paths(target, drafter, tokens, prompt_len)]


@torch.no_grad()
def text_paths(target: Target, drafter: Drafter | EagleDrafter, tokens: Tensor, prompt_len: int) -> list[TextPath]:
    """What a round would accept from every start of each row of ``tokens`` [B, S], drawn as `path_acceptance` says."""
    gamma, (b, s) = drafter.block_size, tokens.shape
    starts = torch.arange(prompt_len, s - gamma, device=tokens.device)
    anchors = Anchors(
        positions=starts.expand(b, -1),
        kept=torch.ones(b, len(starts), dtype=torch.bool, device=tokens.device),
        mask=torch.ones(b, len(starts), gamma, dtype=torch.bool, device=tokens.device),
    )
    states = causal_forward(target.model, tokens, drafter.drafter_cfg.target_layer_ids)
    block = block_forward(drafter, tokens, states.aux, anchors)
    draft = block.logits.float().log_softmax(dim=-1)
    truth = target.local_logits(states.hidden).float().log_softmax(dim=-1)
    labels = label_positions(anchors.positions, gamma)
    true = tokens.gather(1, labels.flatten(1)).view_as(labels)
    p_d = draft.gather(-1, true[..., None])[..., 0]
    log_t = truth[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]  # of the token at i + 1, at i
    p_t = log_t.gather(1, (labels - 1).flatten(1)).view_as(labels)
    survive = (p_d - p_t).clamp(max=0).exp().cumprod(dim=-1).double().cpu().numpy()
    if block.confidence_logits is None:
        return [TextPath(survival=row) for row in survive]
    logits = block.confidence_logits.double().cpu().numpy()
    return [TextPath(survival=row, confidence_logits=c) for row, c in zip(survive, logits, strict=True)]


def _walk(survive: np.ndarray) -> PathAcceptance:
    """``survive`` [A, γ]: chance that a round from start a accepts its first k tokens; rounds go from start to start."""
    num, gamma = survive.shape
    ends = np.concatenate([np.ones((num, 1)), survive], axis=1) - np.concatenate([survive, np.zeros((num, 1))], axis=1)
    visits = np.zeros(num + gamma + 1)
    visits[0] = 1.0
    for a in range(num):
        visits[a + 1 : a + gamma + 2] += visits[a] * ends[a]
    rounds = visits[:num]
    accepted = rounds @ survive
    return PathAcceptance(
        num_rounds=float(rounds.sum()),
        num_tokens=float(rounds.sum() + accepted.sum()),
        accepted=tuple(float(x) for x in accepted),
    )


def total(parts: list[PathAcceptance]) -> PathAcceptance:
    """All of them together."""
    return PathAcceptance(
        num_rounds=sum(p.num_rounds for p in parts),
        num_tokens=sum(p.num_tokens for p in parts),
        accepted=tuple(np.sum([p.accepted for p in parts], axis=0).tolist()),
    )
