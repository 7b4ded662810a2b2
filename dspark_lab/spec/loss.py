"""The three losses of a DSpark drafter as weighted means, and what they are compared with. Pure functions on tensors.

B sequences, A anchors, γ slots, V vocabulary. Formulas: arXiv 2607.05147; L = α_ce·CE + α_l1·‖p_d − p_t‖₁ + α_c·BCE(c, c*).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6
"""Added to each denominator, so that a batch without any anchor gives 0."""


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What each term counts, and how fast slots fade: w_k = exp(−(k − 1) / decay)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Scalars, and the acceptance that they stand for."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    accept_length: Tensor
    """1 + the mean over anchors of Σ_k Π_{i≤k} c*_i: expected tokens a round at temperature 1, detached."""


def slot_weights(mask: Tensor, decay: float) -> Tensor:
    """``mask`` [B, A, γ] times w_k, float32."""
    k = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.float32)
    return mask * torch.exp(-k / decay)


def acceptance(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """c* = 1 − ½‖p_d − p_t‖₁ over the last dimension, within 0 to 1, detached: the chance that chain sampling accepts a draw."""
    return (1 - 0.5 * (draft_probs - target_probs).abs().sum(dim=-1)).clamp(0, 1).detach()


def dspark_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    confidence_logits: Tensor | None,
    weights: LossWeights = LossWeights(),
) -> Losses:
    """``draft_logits``, ``target_logits`` [B, A, γ, V]; ``labels`` [B, A, γ] int64; ``mask`` [B, A, γ] bool, true on a prefix.

    ``confidence_logits`` [B, A, γ] before the sigmoid, None without that head. Each term is Σ m·w·term / (Σ m·w + 1e-6).
    """
    p_d = draft_logits.float().softmax(dim=-1)
    p_t = target_logits.float().softmax(dim=-1)
    w = slot_weights(mask, weights.decay)
    mass = w.sum() + EPSILON
    accept = acceptance(p_d, p_t)
    ce = F.cross_entropy(draft_logits.float().flatten(0, -2), labels.flatten(), reduction="none").view_as(w)
    l1 = (p_d - p_t).abs().sum(dim=-1)
    bce = w.new_zeros(())
    if confidence_logits is not None:
        each = F.binary_cross_entropy_with_logits(confidence_logits.float(), accept, reduction="none")
        bce = (each * w).sum() / mass
    ce, l1 = (ce * w).sum() / mass, (l1 * w).sum() / mass
    survive = (accept * mask).cumprod(dim=-1).sum(dim=-1)
    anchors = mask[..., 0]
    return Losses(
        total=weights.ce * ce + weights.l1 * l1 + weights.confidence * bce,
        ce=ce.detach(),
        l1=l1.detach(),
        confidence=bce.detach(),
        accept_length=1 + (survive * anchors).sum() / (anchors.sum() + EPSILON),
    )
