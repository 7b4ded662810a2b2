"""Sampling in plain torch: random numbers by name, distributions, draws, and chain rejection sampling of a block.

B requests, γ drafts, W = γ + 1 places, V vocabulary. Greedy rows are distributions with all their mass on the argmax, so that a
batch may mix both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_kernels.accept.reference import Accepted

DRAFT, ACCEPT, BONUS = range(3)
"""Which of a slot's numbers serves what; ``BONUS`` draws from the residual too, since a round needs one or the other."""
FLOOR = 1e-8
"""Least p_d that a ratio divides by, and least residual mass that is drawn from, as in DeepSpec."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """The settings of a batch on its device, and what of them the host must know to launch the right work."""

    temperature: Tensor
    """[B] float32, above 0 unless the row is greedy."""
    top_k: Tensor
    """[B] int64; V and more keep all."""
    top_p: Tensor
    """[B] float32; 1 keeps all."""
    is_greedy: Tensor
    """[B] bool."""
    all_greedy: bool
    cuts: bool
    """Whether any row has a top-k or a top-p."""


# -- random numbers ----------------------------------------------------------------------------------------------------


def uniforms(seed: int, requests: Tensor, anchors: Tensor, num_slots: int) -> Tensor:
    """[B, num_slots, 3] float64 strictly within 0 to 1: a number for each of `DRAFT`, `ACCEPT` and `BONUS` of each slot.

    ``requests`` [B] int64: which request of the workload, not which row of the batch. ``anchors`` [B] int64: position of the
    round's anchor; the first token, from the prompt's last logits, belongs to the position before the first anchor's.

    A counter-based generator has no state that a batch, a rank or a captured graph could move on, so a request draws the same
    numbers whatever runs beside it, and no number serves two positions: a round is named by where its anchor sits, which no two
    rounds of a request share. torch has such a generator in `torch.func._random`, experimental and not in every version that is
    supported here; this one is the published algorithm (J. Salmon et al., SC 2011) on int64 tensors of any device.
    """
    slots = torch.arange(num_slots, device=requests.device)
    low, high = (word[:, None] for word in (requests & _MASK, requests >> 32 & _MASK))
    words = philox((low, anchors[:, None] & _MASK, slots[None], high), (seed & _MASK, seed >> 32 & _MASK))
    return (torch.stack(words[:3], dim=-1).to(torch.float64) + 0.5) / 2.0**32


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10: four words from four words; each an int64 tensor that holds 32 bits, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of 32-bit words; int64 wraps round as uint64 does."""
    product = x * by
    return product >> 32 & _MASK, product & _MASK


# -- distributions -----------------------------------------------------------------------------------------------------


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """``logits`` [B, V] or [B, K, V] to what is sampled, of the same shape; float32, or float64 for such logits.

    Temperature, then top-k, then top-p of what top-k left, renormalised; among equally likely tokens the lower ids are kept.
    Without a synchronise.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    if rows.all_greedy:
        return greedy
    over_rows = (-1, *[1] * (logits.dim() - 1))
    scale = torch.where(rows.is_greedy, 1.0, rows.temperature).view(over_rows).to(logits.dtype)
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


def sample(logits: Tensor, rows: SamplingRows, noise: Tensor, probs: Tensor | None = None) -> Tensor:
    """A token [B] int64 of each row of ``logits`` [B, V] by ``noise`` [B]; what it was drawn from goes to ``probs`` [B, V]."""
    made = probabilities(logits, rows)
    if probs is not None:
        probs.copy_(made)
    return draw(made, noise)


# -- acceptance --------------------------------------------------------------------------------------------------------


def chain_accept(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    lengths: Tensor,
    *,
    accept_noise: Tensor,
    bonus_noise: Tensor,
) -> Accepted:
    """``draft_tokens`` [B, γ] drawn from ``draft_probs`` [B, γ, V], against ``target_probs`` [B, W, V] of the same tokens.

    Draft k is kept while u < p_t(x_k) / p_d(x_k). At the first that is not, the bonus is drawn from the positive part of
    p_t − p_d; where all of the first ``lengths`` [B] int64 drafts pass, from p_t behind the last of them, also where a block
    was cut short. ``accept_noise`` [B, γ] and ``bonus_noise`` [B, W]: uniforms, one a position. What is committed has exactly the
    target's distribution: Y. Leviathan et al., ICML 2023, applied to a chain as DSpark does (arXiv 2607.05147).

    Exact only where ``lengths`` say nothing of the drafts that they let in. Rows of probabilities that are one-hot (greedy) give
    the longest matching prefix and the target's argmax.
    """
    gamma = draft_tokens.shape[1]
    drafted = draft_tokens[..., None]
    p_d = draft_probs.gather(-1, drafted).squeeze(-1).to(torch.float64)
    p_t = target_probs[:, :gamma].gather(-1, drafted).squeeze(-1).to(torch.float64)
    within = torch.arange(gamma, device=draft_tokens.device) < lengths[:, None]
    passed = (accept_noise < p_t / p_d.clamp(min=FLOOR)) & within
    num_accepted = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
    bonus = draw(
        _bonus_weights(draft_probs, target_probs, num_accepted, num_accepted < lengths),
        bonus_noise.gather(1, num_accepted[:, None]).squeeze(1),
    )
    return _accepted(draft_tokens, num_accepted, bonus)


def chain_accept_logits(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_logits: Tensor,
    rows: SamplingRows,
    lengths: Tensor,
    *,
    accept_noise: Tensor,
    bonus_noise: Tensor,
    row_of_place: Tensor | None = None,
) -> Accepted:
    """`chain_accept` of ``target_logits`` [N, V]: a row a place, N = B·W, or where ``row_of_place`` [B·W] int64 is given the row
    of each place; those of places behind a request's length are not read (N and more stand for "none")."""
    b = draft_tokens.shape[0]
    if row_of_place is not None:
        spare = torch.zeros_like(target_logits[:1])
        target_logits = torch.cat((target_logits, spare))[row_of_place.clamp(max=len(target_logits))]
    target_probs = probabilities(target_logits.view(b, -1, target_logits.shape[-1]), rows)
    return chain_accept(
        draft_tokens, draft_probs, target_probs, lengths, accept_noise=accept_noise, bonus_noise=bonus_noise
    )


def _accepted(draft_tokens: Tensor, num_accepted: Tensor, bonus: Tensor) -> Accepted:
    column = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    return Accepted(num_accepted, bonus, torch.where(column == num_accepted[:, None], bonus[:, None], padded))


def _bonus_weights(draft_probs: Tensor, target_probs: Tensor, at: Tensor, rejected: Tensor) -> Tensor:
    """[B, V]: the residual at position ``at`` [B] where a draft was ``rejected`` there, else the target's distribution."""
    batch = torch.arange(len(at), device=at.device)
    target = target_probs[batch, at].to(torch.float64)
    if not draft_probs.shape[1]:
        return target
    drafted = draft_probs[batch, at.clamp(max=draft_probs.shape[1] - 1)].to(torch.float64)
    residual = (target - drafted).clamp(min=0)
    usable = rejected & (residual.sum(dim=-1) > FLOOR)
    return torch.where(usable[:, None], residual, target)
