"""`BatchState`: the batch on the device. Four integers a row, at addresses that never change, updated in place by each round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ANCHOR, SEQ_LEN, SLOT, LIMIT = range(4)


class BatchState:
    """[4, max_rows + 1] int64: anchor, seq_len, slot and limit of each row. The last column is a padded row, never written.

    A row takes part in a round while ``seq_len < limit``; a padded row has limit 0 and the dummy slot. A request that finished
    on the device therefore commits nothing in rounds that were already launched for it, and never outgrows its context.
    """

    def __init__(self, max_rows: int, dummy_slot: int, device: torch.device) -> None:
        self.max_rows, self.dummy_slot, self.device = max_rows, dummy_slot, device
        self.table = torch.zeros(4, max_rows + 1, dtype=torch.int64, device=device)
        self.clear()

    @property
    def anchors(self) -> Tensor:
        """[max_rows] last committed token; sits at position `seq_lens`, not yet in the caches."""
        return self.table[ANCHOR, : self.max_rows]

    @property
    def seq_lens(self) -> Tensor:
        """[max_rows] positions in the caches."""
        return self.table[SEQ_LEN, : self.max_rows]

    @property
    def slots(self) -> Tensor:
        """[max_rows] slot of the caches."""
        return self.table[SLOT, : self.max_rows]

    @property
    def limits(self) -> Tensor:
        """[max_rows] rounds start only below this length: prompt and ``max_new_tokens``."""
        return self.table[LIMIT, : self.max_rows]

    def clear(self) -> None:
        """All rows padded."""
        self.table.zero_()
        self.table[SLOT].fill_(self.dummy_slot)

    def keep(self, rows: Sequence[int]) -> Tensor:
        """Moves ``rows`` to the front, in order, and pads the rest; in stream order, without a synchronise.

        Returns the order [max_rows + 1] on the device: which row each of them was.
        """
        order = self.upload([*rows, *[self.max_rows] * (self.max_rows - len(rows)), self.max_rows])
        self.table.copy_(self.table[:, order])
        return order

    def join(self, row: int, *, anchor: Tensor, seq_len: int, slot: int, limit: int) -> None:
        """Fills ``row``; ``anchor`` is a one-element tensor on the device."""
        self.table[SEQ_LEN:, row].copy_(self.upload([seq_len, slot, limit]))
        self.table[ANCHOR, row : row + 1].copy_(anchor.reshape(1))

    def upload(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """``values`` on the device; from pinned memory on a GPU, so that the host does not wait."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)
