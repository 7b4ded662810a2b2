"""`KVCache`: keys and values by slot (a request) and position, with one slot more for padded requests."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """K and V of every layer: [num_layers, num_slots + 1, context_len, num_kv_heads, head_dim].

    Addresses never change after construction, so captured graphs may hold them. The last slot, `dummy_slot`, takes the
    writes of padded requests; no real request ever reads it.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        context_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_slots + 1, context_len, num_kv_heads, head_dim)
        self.num_layers, self.num_slots, self.context_len = num_layers, num_slots, context_len
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def dummy_slot(self) -> int:
        return self.num_slots

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores ``k``, ``v`` [T, h, d] at ``slots``, ``positions`` [T]. Where a place comes twice, either row may stay."""
        self.k[layer][slots, positions] = k
        self.v[layer][slots, positions] = v

    def read(self, layer: int, slots: Tensor, max_keys: int) -> tuple[Tensor, Tensor]:
        """K and V [B, max_keys, h, d] of the first ``max_keys`` positions of ``slots`` [B]; stale places are included."""
        k, v = self.k[layer, :, :max_keys], self.v[layer, :, :max_keys]
        return k.index_select(0, slots), v.index_select(0, slots)

    def reset(self) -> None:
        """Zeros every slot, in place."""
        self.k.zero_()
        self.v.zero_()

    def checksum(self, slot: int) -> int:
        """A number of the slot's exact bits, to tell whether anything wrote there. Synchronises."""
        bits = [t[:, slot].contiguous().view(torch.uint8).to(torch.int64).flatten() for t in (self.k, self.v)]
        weights = torch.arange(1, bits[0].numel() + 1, device=bits[0].device) % 65_521
        return int(((bits[0] + 257 * bits[1]) * weights).sum())
