"""`EpLoad`: what expert parallelism cost, counted on the device and read once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark_lab.ep.dispatch import Dispatched, Dispatcher


class EpLoad:
    """Rows by MoE layer and local expert of one rank, and what it sent. Adding never synchronises."""

    def __init__(
        self, *, num_layers: int, num_local_experts: int, device: torch.device | str, dispatchers: Sequence[Dispatcher]
    ) -> None:
        """``dispatchers``: of each layer."""
        self.dispatchers = dispatchers
        self._ids = torch.arange(-1, num_local_experts, device=device)
        self._counts = torch.zeros(num_layers, num_local_experts + 1, dtype=torch.int64, device=device)
        self._hits = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self._sent: list[Tensor | None] = [None] * num_layers
        self._num_tokens = [0] * num_layers
        self._wire_bytes = 0
        self.num_forwards = [0] * num_layers

    def add(self, layer: int, handle: Dispatched, num_rows: int) -> None:
        """Counts what the ``layer``-th MoE layer's dispatch of ``num_rows`` rows of this rank made."""
        rows = (handle.local_ids.reshape(-1, 1) == self._ids).sum(0)
        self._counts[layer] += rows
        self._hits[layer] += (rows[1:] > 0).sum()
        self._num_tokens[layer] += num_rows
        self.num_forwards[layer] += 1
        fixed = getattr(self.dispatchers[layer], "wire_bytes", None)
        self._wire_bytes += fixed(num_rows) if fixed is not None else 0
        if handle.rows_to is not None:
            before = self._sent[layer]
            self._sent[layer] = handle.rows_to.clone() if before is None else before + handle.rows_to

    def reset(self) -> None:
        self._counts.zero_()
        self._hits.zero_()
        self._sent = [None] * len(self._sent)
        self._num_tokens = [0] * len(self._num_tokens)
        self._wire_bytes = 0
        self.num_forwards = [0] * len(self.num_forwards)

    def report(self, ep_rank: int = 0) -> dict[str, Any]:
        """Plain values; the one place that synchronises.

        ``rows`` [layer][local expert] computed here; ``experts_hit`` [layer]: experts with a row, mean a forward; ``num_dropped`` [layer]: padding and other ranks' rows;
        ``num_tokens`` [layer]: rows of the forwards, padding included; ``rows_to`` [layer][rank]: rows that travelled, own
        ones included, where each goes where its experts are; ``bytes_sent`` by this rank, to others.
        """
        counts = self._counts.tolist()
        sent = [s.tolist() if s is not None else None for s in self._sent]
        by_row = [getattr(d, "bytes_a_row", 0) for d in self.dispatchers]
        travelled = [sum(s) - s[ep_rank] if s is not None else 0 for s in sent]
        return {
            "rows": [layer[1:] for layer in counts],
            "experts_hit": [h / max(n, 1) for h, n in zip(self._hits.tolist(), self.num_forwards, strict=True)],
            "num_dropped": [layer[0] for layer in counts],
            "num_tokens": list(self._num_tokens),
            "rows_to": [s for s in sent if s is not None],
            "bytes_sent": self._wire_bytes + sum(n * b for n, b in zip(travelled, by_row, strict=True)),
        }
