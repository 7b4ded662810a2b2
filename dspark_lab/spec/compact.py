"""Compact verification: only the rows that are verified, of all requests one behind the other. B requests, W = γ + 1 columns.

The padded layout has a row for each of B·W places; the compact one has T rows, real ones first. Everything between the two is
an index, computed on the device from the lengths, without a synchronise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Compact:
    """The two indices. B·W stands for "no place", T for "no row": both point at a spare row behind the last."""

    places: Tensor
    """[T] int64: the place in the padded layout of each row; B·W for rows behind the last real one."""
    rows: Tensor
    """[B·W] int64: the row of each place; T for places that are not verified."""

    def to_rows(self, padded: Tensor, fill: int | float = 0) -> Tensor:
        """``padded`` [B·W, …] to [T, …]; rows without a place hold ``fill``."""
        return _spare(padded, fill)[self.places]

    def to_places(self, rows: Tensor, fill: int | float = 0) -> Tensor:
        """``rows`` [T, …] to [B·W, …]; places that are not verified hold ``fill``."""
        return _spare(rows, fill)[self.rows]


def compact(lengths: Tensor, takes_part: Tensor, *, width: int, num_rows: int) -> Compact:
    """``lengths`` [B] int64 drafts to verify of requests that take part ([B] bool; others have no row, padded ones neither).

    Each has 1 + length rows, in order. ``num_rows`` T must be at least their sum: what does not fit is not verified, and since
    acceptance stops at the length that was asked for, the caller must give enough.
    """
    b = lengths.shape[0]
    verified = torch.where(takes_part, lengths + 1, 0)
    ends = verified.cumsum(0)
    row = torch.arange(num_rows, device=lengths.device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=b - 1)
    column = row - (ends - verified)[request]
    nowhere = b * width
    places = torch.where(row < ends[-1], request * width + column, nowhere)
    rows = torch.full((nowhere + 1,), num_rows, dtype=torch.int64, device=lengths.device)
    return Compact(places=places, rows=rows.scatter(0, places, row)[:nowhere])


def _spare(x: Tensor, fill: int | float) -> Tensor:
    return torch.cat((x, torch.full_like(x[:1], fill)))
