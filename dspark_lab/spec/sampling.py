"""From logits to the distribution that is sampled, alike for drafter and target: temperature, then top-k, then top-p.

B requests, V vocabulary. Greedy rows are distributions with all their mass on the argmax, so that a batch may mix both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.config.choices import MIN_TEMPERATURE
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request samples."""

    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Keeps the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keeps the fewest of the likeliest tokens whose mass reaches p."""

    def __post_init__(self) -> None:
        t, p = self.temperature, self.top_p
        if not _is_number(t) or not (t == 0 or MIN_TEMPERATURE <= t < math.inf):
            raise LabError(
                f"temperature={shown(t)} is neither 0 (greedy) nor a finite number of at least {MIN_TEMPERATURE}."
            )
        if not is_int(self.top_k) or self.top_k < 0:
            raise LabError(f"top_k={shown(self.top_k)} is not a whole number of at least 0; 0 keeps every token.")
        if not _is_number(p) or not 0 < p <= 1:
            raise LabError(f"top_p={shown(p)} is not above 0 and at most 1; 1 keeps every token.")

    @property
    def is_greedy(self) -> bool:
        """At temperature 0, and wherever one token is kept."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def label(self) -> str:
        """What figures may call it: never sampling where one token is kept, whatever the temperature says."""
        if self.is_greedy:
            return "greedy" if self.temperature == 0 else f"greedy (top_k=1 at temperature {self.temperature:g})"
        cuts = [f"top_k={self.top_k}"] * (self.top_k > 0) + [f"top_p={self.top_p:g}"] * (self.top_p < 1)
        return ", ".join([f"sampling at temperature {self.temperature:g}", *cuts])


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """The settings of a batch on its device, and what of them the host must know to launch the right work."""

    temperature: Tensor
    """[B] float32."""
    top_k: Tensor
    """[B] int64; V and more keep all."""
    top_p: Tensor
    """[B] float32."""
    is_greedy: Tensor
    """[B] bool."""
    all_greedy: bool
    cuts: bool
    """Whether any row has a top-k or a top-p, which cost a sort."""

    @classmethod
    def of(cls, requests: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingRows:
        keep_all = 2**62
        return cls(
            temperature=torch.tensor([s.temperature for s in requests], dtype=torch.float32, device=device),
            top_k=torch.tensor([s.top_k or keep_all for s in requests], dtype=torch.int64, device=device),
            top_p=torch.tensor([s.top_p for s in requests], dtype=torch.float32, device=device),
            is_greedy=torch.tensor([s.is_greedy for s in requests], dtype=torch.bool, device=device),
            all_greedy=all(s.is_greedy for s in requests),
            cuts=any(not s.is_greedy and (s.top_k > 0 or s.top_p < 1) for s in requests),
        )


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """``logits`` [B, V] or [B, K, V] to what is sampled, of the same shape; float32, or float64 for such logits.

    Top-p is of what top-k left, renormalised; among equally likely tokens the lower ids are kept. Without a synchronise.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    if rows.all_greedy:
        return greedy
    over_rows = (-1, *[1] * (logits.dim() - 1))
    scale = rows.temperature.clamp(min=MIN_TEMPERATURE).view(over_rows).to(logits.dtype)
    probs = (logits / scale).softmax(dim=-1)
    if rows.cuts:
        probs = _cut(probs, rows.top_k.view(over_rows), rows.top_p.view(over_rows))
    return torch.where(rows.is_greedy.view(over_rows), greedy, probs)


def _cut(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered * (torch.arange(probs.shape[-1], device=probs.device) < top_k)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered * ((before < top_p) | (top_p >= 1))
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, ordered)


def draw(weights: Tensor, noise: Tensor) -> Tensor:
    """A token [..] int64 from each of ``weights`` [.., V] (at least 0, of any sum above it) by one uniform ``noise`` [..].

    By the inverse of the cumulative sum in float64; a token without weight is never drawn. Weights that are none (NaN, of a
    padded row) give some id of the vocabulary.
    """
    cumulative = weights.to(torch.float64).cumsum(dim=-1)
    at = (noise.to(torch.float64) * cumulative[..., -1])[..., None]
    return torch.searchsorted(cumulative, at, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
