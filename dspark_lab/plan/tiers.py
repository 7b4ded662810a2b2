"""Row counts that a compact verify forward is padded to. A graph has one number of rows, so each tier is a graph."""

from __future__ import annotations

from collections.abc import Iterable

from dspark_lab.errors import LabError


def tiers_of(buckets: Iterable[int], *, width: int, chunks: int = 1) -> list[int]:
    """Rising row counts: each of ``buckets`` requests times 1 to ``width`` rows, those that ``chunks`` ranks can share evenly.

    A bucket of b requests then verifies b, 2b, … b·W rows, so that a tier is at most twice what is needed and mostly much
    closer; buckets share most of their tiers.
    """
    sizes = sorted({b * rows for b in buckets for rows in range(1, width + 1)})
    usable = [n for n in sizes if n % chunks == 0]
    if not usable:
        raise LabError(f"no tier of {sizes} is a multiple of {chunks}, which many ranks share the rows of a forward.")
    return usable
