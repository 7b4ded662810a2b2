"""Decisions on padded rows: who reads the device scalar, which bucket a batch is padded to, how many real rows a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

from dspark_lab.config.choices import DISPATCHERS, NEED_ALIKE, TAKE_BOTH
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.errors import LabError


def enable_num_token_non_padded(parallel: ParallelConfig) -> bool:
    """Whether a forward needs `num_token_non_padded` on the device: exactly ``ep_size > 1``.

    Nothing else enters: neither attention DP, nor graphs, nor whether the drafter has experts.
    """
    return parallel.ep_size > 1


def chunk_ranks(parallel: ParallelConfig) -> int:
    """Ranks that cut the rows they share into chunks, one each, to dispatch them: padded rows must be a multiple. 1: none do."""
    p = parallel
    takes_both = p.dispatcher in TAKE_BOTH or p.dispatcher not in DISPATCHERS  # a foreign one is told how rows lie
    whole = p.ep_size == 1 or p.dispatcher in NEED_ALIKE or (p.attn_dp == 1 and takes_both)
    return 1 if whole else p.rows_ranks


def slots_of(batch_size: int, attn_dp: int, replica: int) -> list[int]:
    """Which of ``batch_size`` slots (requests at a time) attention replica ``replica`` serves: every ``attn_dp``-th; maybe none."""
    return list(range(replica, batch_size, attn_dp))


def usable_buckets(buckets: Iterable[int], parallel: ParallelConfig) -> list[int]:
    """Those of ``buckets`` whose rows can be cut into chunks, rising. Raises `LabError` where there is none."""
    t = chunk_ranks(parallel)
    usable = sorted(b for b in buckets if b % t == 0)
    if not usable:
        raise LabError(
            f"dispatcher={parallel.dispatcher!r} cuts the rows that {t} ranks share into {t} chunks, and no bucket of "
            f"{sorted(buckets)} is a multiple of {t}; add one, or choose attn_dp={parallel.ep_size} or dispatcher='all_reduce'."
        )
    return usable


def bucket_for(num: int, buckets: Iterable[int], *, what: str = "batch_size") -> int:
    """The smallest of ``buckets`` that holds ``num`` requests, or rows of a compact forward: ``what`` names them in the error.
    Raises `LabError` where none does."""
    sizes = sorted(buckets)
    for size in sizes:
        if size >= num:
            return size
    raise LabError(f"{what}={num} is over the largest bucket, {sizes[-1] if sizes else 'of which there are none'}.")


def local_counts(num_tokens: int, padded_tokens: int, attn_tp: int) -> list[int]:
    """Real rows of each attention-TP rank, when ``padded_tokens`` (W) rows are cut into equal chunks.

    ``local(r) = clamp(G - (W/t)*r, 0, W/t)`` with G = ``num_tokens`` and t = ``attn_tp``; the counts sum to G, and the
    last ranks may hold none. Raises `LabError` where W is not a multiple of t (a floor chunk would lose rows) or G > W.
    """
    if attn_tp < 1 or padded_tokens % attn_tp:
        raise LabError(
            f"padded_tokens={padded_tokens} is not a multiple of attn_tp={attn_tp}: chunks of unequal size would lose rows."
        )
    if not 0 <= num_tokens <= padded_tokens:
        raise LabError(f"num_tokens={num_tokens} is not within 0 to padded_tokens={padded_tokens}.")
    chunk = padded_tokens // attn_tp
    return [min(max(num_tokens - chunk * rank, 0), chunk) for rank in range(attn_tp)]
