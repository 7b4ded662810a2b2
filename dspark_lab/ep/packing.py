"""A row, its experts and their weights as one row of bytes, so that a dispatch is one collective."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGN = 16


class RowPacking:
    """[R, H] rows, [R, k] ids and [R, k] float32 weights in [R, row_bytes] uint8 and back; every part 16-byte aligned."""

    def __init__(self, hidden_size: int, topk: int, dtype: torch.dtype) -> None:
        self.hidden_size, self.topk, self.dtype = hidden_size, topk, dtype
        self._x = _aligned(hidden_size * dtype.itemsize)
        self._k = _aligned(4 * topk)
        self.row_bytes = self._x + 2 * self._k

    def pack(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        parts = (_bytes(x, self._x), _bytes(ids.to(torch.int32), self._k), _bytes(weights.float(), self._k))
        return torch.cat(parts, dim=1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, H], ids [R, k] int64, weights [R, k] float32 of ``rows`` [R, row_bytes]."""
        x = rows[:, : self.hidden_size * self.dtype.itemsize].view(self.dtype)
        ids = rows[:, self._x : self._x + 4 * self.topk].view(torch.int32)
        weights = rows[:, self._x + self._k : self._x + self._k + 4 * self.topk].view(torch.float32)
        return x.contiguous(), ids.long(), weights.contiguous()

    def nobody(self, num_rows: int, device: torch.device) -> Tensor:
        """[num_rows, row_bytes] of zeros whose experts are −1: computed by nobody."""
        rows = torch.zeros(num_rows, self.row_bytes, dtype=torch.uint8, device=device)
        rows[:, self._x : self._x + self._k] = 255  # −1 in any integer
        return rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _bytes(part: Tensor, width: int) -> Tensor:
    raw = part.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, width - raw.shape[1])) if raw.shape[1] < width else raw
