"""`EpLoad`: what expert parallelism cost, counted on the device and read once at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class EpLoad:
    """Rows by MoE layer and local expert of one rank. Adding never synchronises, and counts in replayed graphs too."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_local_experts: int,
        num_ranks: int,
        topk: int,
        row_bytes: int,
        device: torch.device | str,
    ) -> None:
        self.num_ranks, self.topk, self.row_bytes = num_ranks, topk, row_bytes
        self._ids = torch.arange(-1, num_local_experts, device=device)
        self._counts = torch.zeros(num_layers, num_local_experts + 1, dtype=torch.int64, device=device)
        self._hits = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self.num_forwards = [0] * num_layers

    def add(self, layer: int, local_ids: Tensor) -> None:
        """Counts ``local_ids`` [T, k] (−1: dropped) of the ``layer``-th MoE layer."""
        rows = (local_ids.reshape(-1, 1) == self._ids).sum(0)
        self._counts[layer] += rows
        self._hits[layer] += (rows[1:] > 0).sum()
        self.num_forwards[layer] += 1

    def reset(self) -> None:
        self._counts.zero_()
        self._hits.zero_()
        self.num_forwards = [0] * len(self.num_forwards)

    def report(self) -> dict[str, Any]:
        """Plain values; the one place that synchronises.

        ``rows`` [layer][local expert] computed here; ``experts_hit`` [layer]: experts with a row, mean a forward; ``num_dropped`` [layer]: padding and other ranks' rows;
        ``num_tokens`` [layer]: rows of the forwards, padding included; ``bytes_sent`` by this rank in all-reduces, as a ring
        sends them: 2·(n−1)/n of each output.
        """
        counts = self._counts.tolist()
        num_tokens = [sum(layer) // self.topk for layer in counts]
        ring = 2 * (self.num_ranks - 1) / self.num_ranks
        return {
            "rows": [layer[1:] for layer in counts],
            "experts_hit": [h / max(n, 1) for h, n in zip(self._hits.tolist(), self.num_forwards, strict=True)],
            "num_dropped": [layer[0] for layer in counts],
            "num_tokens": num_tokens,
            "bytes_sent": round(sum(num_tokens) * self.row_bytes * ring),
        }
