"""Which steps of a trace are meant: one number, a range of them, or all."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dspark_lab.errors import LabError

_WAY = "give one number, a range (slice(2, 5); 2:5 on the command line), or None for all"


@dataclass(frozen=True)
class StepRange:
    """Steps by number, from ``first`` to before ``end``; None: no bound."""

    first: int | None = None
    end: int | None = None

    @classmethod
    def of(cls, steps: Any) -> Self:
        """From a number, a slice or range without a stride, or None. Raises `LabError` for anything else."""
        if steps is None:
            return cls()
        if isinstance(steps, (slice, range)):
            if steps.step not in (None, 1):
                raise LabError(f"steps={_said(steps)} has a stride, and steps are taken one behind the other; {_WAY}.")
            found = cls(*(None if n is None else _number(n, steps) for n in (steps.start, steps.stop)))
            if found.first is not None and found.end is not None and found.end <= found.first:
                raise LabError(f"steps={_said(steps)} is an empty range: its end is not after its start.")
            return found
        first = _number(steps, steps)
        return cls(first, first + 1)

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these step numbers are meant."""
        low = np.ones(len(numbers), dtype=bool) if self.first is None else numbers >= self.first
        return low if self.end is None else low & (numbers < self.end)

    def none_of(self, numbers: np.ndarray, where: str = "the trace") -> LabError:
        """The error where no step is meant of those that there are."""
        there = f"has steps {numbers.min()} to {numbers.max()}" if len(numbers) else "has no steps"
        return LabError(f"there is no {self} in {where}, which {there}.")

    def __str__(self) -> str:
        if self.first is None and self.end is None:
            return "step"
        if self.end is None:
            return f"step from {self.first} on"
        first = 0 if self.first is None else self.first
        return f"step {first}" if self.end - first == 1 else f"step of {first} to {self.end - 1}"


def _number(value: Any, steps: Any) -> int:
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise LabError(f"steps={_said(steps)} names no steps; {_WAY}.")
    if number < 0:
        raise LabError(f"steps={_said(steps)}: steps go by their own numbers, from 0 on, not from the end; {_WAY}.")
    return number


def _said(steps: Any) -> str:
    """As Python has it, without the stride where there is none."""
    if isinstance(steps, slice) and steps.step is None:
        return f"slice({steps.start!r}, {steps.stop!r})"
    text = repr(steps)
    return text if len(text) < 60 else f"{text[:57]}..."


def step_number(step: Any) -> int | None:
    """One step's number, or None. Raises `LabError` for anything else."""
    if step is None:
        return None
    try:
        if isinstance(step, (slice, range)):
            raise LabError("a range")
        return StepRange.of(step).first
    except LabError:
        raise LabError(f"step={_said(step)} is no step number; give one that the trace has, such as step=4.") from None
