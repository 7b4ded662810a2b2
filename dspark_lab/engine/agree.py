"""What ranks agree on before a step: whatever decides a graph's key or a shape, and what replicas committed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark_lab.ep.control import Control
from dspark_lab.errors import RanksDisagree


@dataclass(kw_only=True)
class _Claim:
    """What a rank said of one step, and where the others' words arrive."""

    what: str
    shape: dict[str, int]
    results: list[list[int]]
    out: Any = None
    work: Any = None


@dataclass(kw_only=True)
class Agreement:
    """One rank's side. ``control`` is None where there is one rank: then all is agreed."""

    control: Control | None = None
    rows_ranks: int = 1
    """Neighbouring ranks that serve the same requests, and so must decide alike."""
    _pending: _Claim | None = field(default=None, init=False)
    _shape: dict[str, int] = field(default_factory=dict, init=False)

    def of_replicas(self, values: Sequence[int], what: str) -> list[list[int]]:
        """``values`` of every rank, by rank; one wait. Raises `RanksDisagree` where ranks of one replica differ."""
        if self.control is None:
            return [list(values)]
        everyone = self.control.gather(list(values), what)
        for first in range(0, len(everyone), self.rows_ranks):
            for rank in range(first + 1, first + self.rows_ranks):
                if everyone[rank] != everyone[first]:
                    k = next(i for i, (a, b) in enumerate(zip(everyone[first], everyone[rank], strict=True)) if a != b)
                    raise RanksDisagree(
                        f"ranks disagree on value {k} of {what}: rank {first} has {everyone[first][k]}, "
                        f"rank {rank} has {everyone[rank][k]}."
                    )
        return everyone

    def confirm(self, what: str, shape: dict[str, int], results: list[list[int]]) -> None:
        """All ranks do the same: ``shape`` decides the step that follows, ``results`` is what was read since the last call.

        A wait only where ``shape`` changes; else the words travel while the device works, and are read at the next call.
        Raises `RanksDisagree` with the first differing value.
        """
        if self.control is None:
            return
        claim = _Claim(what=what, shape=shape, results=results)
        words = [*shape.values(), _digest(results)]
        claim.out, claim.work = self.control.start(words)
        before, self._pending = self._pending, claim
        if before is not None:
            self._settle(before)
        if shape != self._shape:
            self._settle(claim)
            self._pending = None
        self._shape = dict(shape)

    def close(self) -> None:
        """Reads what is still on its way."""
        if self._pending is not None:
            self._settle(self._pending)
            self._pending = None

    def _settle(self, claim: _Claim) -> None:
        assert self.control is not None
        self.control.wait(claim.work.is_completed, claim.what)
        claim.work.wait()
        everyone = claim.out.numpy()
        if (everyone == everyone[0]).all():
            return
        names = [*claim.shape, "results"]
        column = int((everyone != everyone[0]).any(axis=0).argmax())
        rank = int((everyone[:, column] != everyone[0, column]).argmax())
        if names[column] != "results":
            raise RanksDisagree(
                f"ranks disagree on {names[column]} at {claim.what}: rank 0 has {everyone[0, column]}, "
                f"rank {rank} has {everyone[rank, column]}; a step with different shapes would hang."
            )
        raise _first_difference(self.control.objects(claim.results), rank, claim.what)


def _digest(results: list[list[int]]) -> int:
    """An int of the rows; 0 without any."""
    return zlib.crc32(np.array([x for row in results for x in (len(row), *row)], dtype=np.int64).tobytes())


def _first_difference(everyone: list[list[list[int]]], rank: int, what: str) -> RanksDisagree:
    """Of the committed rows of ``rank`` and rank 0."""
    ours, theirs = everyone[0], everyone[rank]
    for row, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        for column, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return RanksDisagree(
                    f"ranks disagree on tokens[{row}, {column}] read before {what}: rank 0 has {x}, rank {rank} has {y}; "
                    "their next steps would differ, and hang."
                )
    return RanksDisagree(
        f"ranks disagree on the number of results read before {what}: rank 0 has {len(ours)}, rank {rank} has {len(theirs)}."
    )
