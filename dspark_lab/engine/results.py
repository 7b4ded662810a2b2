"""What a round sends to the host: a row of integers a request, and what stands where in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RoundDetail:
    """One round of one request, as a person would look at it."""

    drafts: list[int]
    """All γ draft tokens, verified or not."""
    confidence: list[float] | None
    """[γ] what the schedule read (calibrated where a table is in use); None without a confidence head."""
    verified: int
    """Drafts that the target saw."""
    tokens: list[int]
    """Committed: accepted drafts, then the target's own."""

    @property
    def accepted(self) -> int:
        """Drafts that were kept."""
        return len(self.tokens) - 1


@dataclass(frozen=True, kw_only=True)
class Columns:
    """[rows, `num`] int64: W tokens, how many of them were committed (0: took no part), drafts verified, and what is asked for."""

    gamma: int
    overflow: bool = False
    """One more: rows that dispatchers lost for want of room, so far."""
    confidence: bool = False
    """γ more: the bits of float32."""
    drafts: bool = False
    """γ more."""

    @property
    def packed(self) -> int:
        """Tokens, committed, verified."""
        return self.gamma + 3

    @property
    def num(self) -> int:
        return self.packed + self.overflow + self.gamma * (self.confidence + self.drafts)

    def write(
        self,
        out: Tensor,
        packed: Tensor,
        *,
        lost: Tensor | None,
        confidence: Tensor | None,
        drafts: Tensor,
    ) -> None:
        """Fills ``out`` [b, `num`] on the device from ``packed`` [b, γ + 3], ``lost`` [1], ``confidence`` and ``drafts`` [b, γ]."""
        parts = [packed]
        if self.overflow:
            assert lost is not None
            parts.append(lost.expand(len(packed), 1))
        if self.confidence:
            assert confidence is not None
            parts.append(confidence.view(torch.int32).long())
        if self.drafts:
            parts.append(drafts)
        out.copy_(torch.cat(parts, dim=1))

    def tokens(self, row: list[int]) -> list[int]:
        """Committed by the round; empty where the request took no part."""
        return row[: row[self.gamma + 1]]

    def verified(self, row: list[int]) -> int:
        return row[self.gamma + 2]

    def lost(self, row: list[int]) -> int:
        """Rows lost so far; 0 where they are not counted."""
        return row[self.packed] if self.overflow else 0

    def confidence_of(self, rows: list[list[int]]) -> np.ndarray:
        """[rows, γ] float32."""
        start = self.packed + self.overflow
        bits = np.array([row[start : start + self.gamma] for row in rows], dtype=np.int64).reshape(-1, self.gamma)
        return bits.astype(np.int32).view(np.float32)

    def detail(self, row: list[int]) -> RoundDetail:
        """The round that ``row`` tells of; needs drafts."""
        confidence = self.confidence_of([row])[0].tolist() if self.confidence else None
        return RoundDetail(
            drafts=row[self.num - self.gamma :] if self.gamma else [],
            confidence=confidence,
            verified=self.verified(row),
            tokens=self.tokens(row),
        )
