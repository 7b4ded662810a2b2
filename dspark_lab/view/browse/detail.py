"""Level of detail: what of a row of events can be told apart in so many pixels. Pure: arrays in, arrays out.

Time is cut into cells of a few pixels. An event at least a cell long, or alone in its cell, is a box of its own; the others of a cell are one box
that says how many began in it and what share of the cell they cover. So nothing drawn reaches over idle time, however far one looks from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

CELL_PX = 3
"""Width of a cell in pixels."""
LIMIT = 12_000
"""Boxes of a view; over that, cells grow."""


@dataclass(frozen=True, eq=False)
class Row:
    """Events of one line of the picture, sorted by start: int64 nanoseconds, and codes of the colour and name of each."""

    start: np.ndarray
    end: np.ndarray
    colour: np.ndarray
    name: np.ndarray
    hits: np.ndarray | None = None
    """Positions of the events that a search found, sorted."""

    def __len__(self) -> int:
        return len(self.start)

    def marked(self, hits: np.ndarray | None) -> Row:
        """The row with other ``hits``; what was worked out of it goes along."""
        row = replace(self, hits=hits)
        row.__dict__.update(
            {k: v for k, v in self.__dict__.items() if k in ("reach", "added", "_covered", "_by_colour")}
        )
        return row

    @cached_property
    def reach(self) -> np.ndarray:
        """Latest end of any event so far."""
        return np.maximum.accumulate(self.end) if len(self) else self.end

    @cached_property
    def added(self) -> np.ndarray:
        """What each event adds to the time covered, ns."""
        before = np.concatenate((self.start[:1], self.reach[:-1]))
        return np.maximum(self.end - np.maximum(self.start, before), 0)

    @cached_property
    def _covered(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.added)))

    @cached_property
    def _by_colour(self) -> dict[int, np.ndarray]:
        """For each colour, time that its events add, summed up to each position."""
        found = np.unique(self.colour)
        return {int(c): np.concatenate(([0], np.cumsum(np.where(self.colour == c, self.added, 0)))) for c in found}

    def covered(self, at: np.ndarray) -> np.ndarray:
        """Time that is covered by any event up to each time of ``at``, ns."""
        if not len(self):
            return np.zeros(len(at), dtype=np.int64)
        upto = np.searchsorted(self.start, at, side="right")
        beyond = np.maximum(self.reach[np.maximum(upto - 1, 0)] - at, 0)
        return self._covered[upto] - np.where(upto > 0, beyond, 0)

    def by_colour(self, bounds: np.ndarray) -> dict[int, np.ndarray]:
        """Time that the events between each two of ``bounds`` add, ns, for each colour of the row."""
        return {c: np.diff(sums[bounds]) for c, sums in self._by_colour.items()}


@dataclass(frozen=True, eq=False)
class Boxes:
    """What is drawn, an entry a box. ``event`` is the position in its row, −1 for a merged one, which has no name either (−1);
    ``count`` events began in it and cover ``share`` of it; ``hit``: how many of them a search found."""

    row: np.ndarray
    start: np.ndarray
    end: np.ndarray
    colour: np.ndarray
    name: np.ndarray
    event: np.ndarray
    count: np.ndarray
    share: np.ndarray
    hit: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def merged(self) -> np.ndarray:
        """Which boxes stand for more than one event."""
        return self.event < 0


def look(rows: Sequence[Row], lo: int, hi: int, *, pixels: int | None, limit: int = LIMIT) -> tuple[Boxes, int]:
    """The boxes of all rows between ``lo`` and ``hi`` (ns) on ``pixels`` pixels, at most ``limit``; and the width of a cell in ns.

    ``pixels`` None: nothing is merged (the cell is 0) as long as the events of the view are within ``limit``.
    """
    cell = 0 if pixels is None else max((hi - lo) * CELL_PX // max(pixels, 1), 1)
    if cell == 0 and sum(len(range(*_within(row, lo, hi))) for row in rows) > limit:
        cell = max((hi - lo) // limit, 1)
    while True:
        parts = [_row(row, i, lo, hi, cell) for i, row in enumerate(rows)]
        if sum(map(len, parts)) <= limit or cell >= hi - lo:
            return _joined(parts), cell
        cell *= 2


def _within(row: Row, lo: int, hi: int) -> tuple[int, int]:
    """Positions from the first event that has not ended before the view to the first that begins after it."""
    return int(np.searchsorted(row.reach, lo, side="right")), int(np.searchsorted(row.start, hi, side="left"))


def _row(row: Row, at: int, lo: int, hi: int, cell: int) -> Boxes:
    first, last = _within(row, lo, hi)
    if first >= last:
        return _boxes(row, at, np.zeros(0, dtype=np.int64))
    big = first + np.flatnonzero(row.end[first:last] - row.start[first:last] >= cell)
    if not cell or len(big) == last - first:
        return _boxes(row, at, big)
    zero = lo - lo % cell  # cells lie on a grid of their own, so that panning does not make them dance
    edges = zero + cell * np.arange((hi - zero) // cell + 2)
    bounds = np.clip(np.searchsorted(row.start, edges), first, last)
    bounds[0] = first
    a, b = bounds[:-1], bounds[1:]
    of_big = np.searchsorted(big, bounds)
    count = (b - a) - (of_big[1:] - of_big[:-1])
    large = Row(row.start[big], row.end[big], row.colour[big], row.name[big])
    over = np.diff(large.covered(edges))
    busy = np.diff(row.covered(edges)) - over
    alone = np.flatnonzero(count == 1)
    singles = _alone(a[alone], b[alone], big)
    several = np.flatnonzero(count > 1)
    n = len(several)
    hit = np.zeros(n, dtype=np.int64)
    if row.hits is not None:
        small = np.setdiff1d(row.hits, big, assume_unique=True)
        hit = np.diff(np.searchsorted(small, bounds))[several]
    none = np.full(n, -1)
    merged = Boxes(
        row=np.full(n, at), start=edges[several], end=edges[several + 1], colour=_busiest(row, bounds, big, of_big)[several],
        name=none, event=none, count=count[several], hit=hit,
        share=np.clip(busy[several] / np.maximum(cell - over[several], 1), 0.0, 1.0),
    )  # fmt: skip
    return _joined([merged, _boxes(row, at, np.sort(np.concatenate((big, singles))))])


def _busiest(row: Row, bounds: np.ndarray, big: np.ndarray, of_big: np.ndarray) -> np.ndarray:
    """The colour that covers most of each cell, big events left out."""
    sums = row.by_colour(bounds)
    added, colour = row.added[big], row.colour[big]
    for c in sums if len(big) else ():
        sums[c] = sums[c] - np.diff(np.concatenate(([0], np.cumsum(np.where(colour == c, added, 0))))[of_big])
    return np.array(list(sums), dtype=np.int64)[np.stack(list(sums.values())).argmax(axis=0)]


def _alone(a: np.ndarray, b: np.ndarray, big: np.ndarray) -> np.ndarray:
    """The one event of each a..b−1 that is not among ``big``."""
    out = a.copy()
    taken = np.searchsorted(big, out)
    for _ in range(int((b - a).max()) if len(a) else 0):  # a cell holds few big ones: each begins in it
        isbig = (taken < len(big)) & (big[np.minimum(taken, max(len(big) - 1, 0))] == out) if len(big) else np.zeros(len(out), bool)  # fmt: skip
        if not isbig.any():
            break
        out, taken = out + isbig, taken + isbig
    return out


def _boxes(row: Row, at: int, events: np.ndarray) -> Boxes:
    """Each of ``events`` as a box of its own."""
    n = len(events)
    hit = np.zeros(n, dtype=np.int64) if row.hits is None else np.isin(events, row.hits).astype(np.int64)
    return Boxes(
        row=np.full(n, at), start=row.start[events], end=row.end[events], colour=row.colour[events].astype(np.int64),
        name=row.name[events].astype(np.int64), event=events, count=np.ones(n, dtype=np.int64), share=np.ones(n), hit=hit,
    )  # fmt: skip


def _joined(parts: Sequence[Boxes]) -> Boxes:
    if not parts:
        return _boxes(_EMPTY, 0, np.zeros(0, dtype=np.int64))
    return Boxes(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Boxes)})


_EMPTY = Row(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
