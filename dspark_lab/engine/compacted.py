"""A padded verify batch to its compact twin: the same requests, only the rows that are verified."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dspark_lab.models.batch import ForwardBatch, Ragged
from dspark_lab.spec.compact import compact


def compacted(
    batch: ForwardBatch, lengths: Tensor, takes_part: Tensor, num_rows: int, num_real_rows: int, dummy_slot: int
) -> ForwardBatch:
    """``batch`` of B requests of W rows each, with ``num_rows`` rows: 1 + ``lengths`` [B] of each that ``takes_part`` [B].

    Rows behind the last real one hold token 0 at position 0 of the dummy slot. ``num_real_rows``: how many are real at most,
    as far as the host knows; the device scalar counts the same.
    """
    index = compact(lengths, takes_part, width=batch.num_tokens_per_req, num_rows=num_rows)
    return replace(
        batch,
        input_ids=index.to_rows(batch.input_ids),
        positions=index.to_rows(batch.positions),
        key_limits=index.to_rows(batch.key_limits, 1),
        slots_by_row=index.to_rows(batch.token_slots, dummy_slot),
        num_token_non_padded_cpu=num_real_rows,
        ragged=Ragged(index=index, key_limits=batch.key_limits),
    )
