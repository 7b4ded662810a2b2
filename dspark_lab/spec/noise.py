"""Random numbers by name rather than by turn: Philox 4x32-10 of (seed, request, anchor position, slot).

A counter-based generator has no state that a batch, a rank or a captured graph could move on, so a request draws the same
numbers whatever runs beside it, and no number serves two positions: a round is named by where its anchor sits, which no two
rounds of a request share. torch has such a generator in `torch.func._random`, experimental and not in every version that is
supported here; this one is the published algorithm (J. Salmon et al., SC 2011) on int64 tensors of any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT, ACCEPT, BONUS = range(3)
"""Which of a slot's numbers serves what; ``BONUS`` draws from the residual too, since a round needs one or the other."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words from four words; each an int64 tensor that holds 32 bits, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: int, requests: Tensor, anchors: Tensor, num_slots: int) -> Tensor:
    """[B, num_slots, 3] float64 strictly within 0 to 1: a number for each of `DRAFT`, `ACCEPT` and `BONUS` of each slot.

    ``requests`` [B] int64: which request of the workload, not which row of the batch. ``anchors`` [B] int64: position of the
    round's anchor; the first token, from the prompt's last logits, belongs to the position before the first anchor's.
    """
    slots = torch.arange(num_slots, device=requests.device)
    low, high = (word[:, None] for word in (requests & _MASK, requests >> 32 & _MASK))
    words = philox((low, anchors[:, None] & _MASK, slots[None], high), (seed & _MASK, seed >> 32 & _MASK))
    return (torch.stack(words[:3], dim=-1).to(torch.float64) + 0.5) / 2.0**32


def _multiply(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of 32-bit words; int64 wraps round as uint64 does."""
    product = x * by
    return product >> 32 & _MASK, product & _MASK
