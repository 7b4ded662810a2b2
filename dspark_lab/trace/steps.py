"""Where the steps of a trace begin and end on the host.

Steps are annotated ranges: ``ProfilerStep#N`` by default, else the labels SGLang and vLLM write, else a pattern of the caller's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from dspark_lab.errors import LabError
from dspark_lab.trace.events import in_categories

#: Tried in this order; the first that matches any annotation names the steps.
STEP_PATTERNS: tuple[tuple[str, str], ...] = (
    ("ProfilerStep", r"^ProfilerStep#(\d+)"),
    ("SGLang step label", r"^step\[[^\]]*bs=\d+[^\]]*\]"),
    ("vLLM execute_context label", r"^execute_(?:\d+_)?context_.*generation_"),
    ("vLLM execute_model label", r"(?:^|[.:_ ])execute_model\b"),
)
_ANNOTATIONS = ("user_annotation",)
_MAX_DIGITS = 18  # every such number fits 64 bits


@dataclass(frozen=True, kw_only=True)
class StepWindows:
    """Steps in order of time: label numbers, names, host start and end in ns (int64 arrays), and where they come from."""

    labels: np.ndarray
    names: tuple[str, ...]
    start_ns: np.ndarray
    end_ns: np.ndarray
    source: str
    found: bool = True
    messages: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, ts_ns: np.ndarray) -> np.ndarray:
        """Position of the step whose host window holds each time, −1 where none does."""
        if not len(self):
            return np.full(len(ts_ns), -1)
        place = np.searchsorted(self.start_ns, ts_ns, side="right") - 1
        inside = (place >= 0) & (ts_ns < self.end_ns[place])
        return np.where(inside, place, -1)

    def label(self, place: np.ndarray) -> np.ndarray:
        """Label numbers of positions; −1 stays −1."""
        if not len(self):
            return np.full(len(place), -1)
        return np.where(place >= 0, self.labels[place], -1)

    def follows(self) -> np.ndarray:
        """Whether the next step continues each one; False for the last and before a gap in the profiler's numbering."""
        if not len(self):
            return np.empty(0, dtype=bool)
        consecutive = np.diff(self.labels) == 1 if self.source == "ProfilerStep" else np.ones(len(self) - 1, dtype=bool)
        return np.append(consecutive, False)


def find_steps(events: pd.DataFrame, step_pattern: str | None = None) -> StepWindows:
    """The steps of a table of events.

    Args:
        step_pattern: regular expression searched in the names of annotations and host ops; a group of digits gives the step's number.

    Raises:
        LabError: the pattern is no regular expression, or matches nothing.
    """
    if step_pattern is not None:
        return _by_pattern(events, step_pattern)
    marks = events[in_categories(events, _ANNOTATIONS)]
    for source, pattern in STEP_PATTERNS:
        rows = _matching(marks, pattern)
        if len(rows):
            return _windows(rows, pattern, source)
    return _whole(events)


def _by_pattern(events: pd.DataFrame, pattern: str) -> StepWindows:
    if not isinstance(pattern, str) or not pattern:
        raise LabError(
            f"step_pattern={pattern!r} is no pattern; give a part of the names that steps have, such as 'decode'."
        )
    try:
        re.compile(pattern)
    except re.error as err:
        raise LabError(f"step_pattern={pattern!r} is no regular expression: {err}.") from err
    for categories in (_ANNOTATIONS, ("cpu_op", "python_function")):
        marks = events[in_categories(events, categories)]
        rows = _matching(marks, pattern)
        if len(rows):
            return _windows(rows, pattern, f"step_pattern={pattern!r}")
    names = pd.unique(events[in_categories(events, _ANNOTATIONS)]["name"].astype(str))[:6]
    raise LabError(
        f"step_pattern={pattern!r} matches no annotation or host op; annotations of the trace: {', '.join(map(repr, names)) or 'none'}."
    )


def _matching(marks: pd.DataFrame, pattern: str) -> pd.DataFrame:
    if not len(marks):
        return marks
    search = re.compile(pattern).search
    used = marks["name"].cat.remove_unused_categories()
    wanted = [bool(search(str(c))) for c in used.cat.categories]
    return marks[np.array(wanted, dtype=bool)[used.cat.codes.to_numpy()]]


def _windows(rows: pd.DataFrame, pattern: str, source: str) -> StepWindows:
    start = rows["ts_ns"].to_numpy()
    end = start + rows["dur_ns"].to_numpy()
    names = rows["name"].astype(str).to_numpy()
    outer, messages = _outermost(start, end), []
    if not outer.all():
        messages.append(f"{int((~outer).sum())} step annotations lie inside another and are not counted as steps")
    start, end, names = start[outer], end[outer], names[outer]
    end = np.minimum(
        end, np.append(start[1:], end[-1])
    )  # neighbours may overlap by nanoseconds where stacks are recorded
    found = [re.search(pattern, n) for n in names]
    digits = [m[1] if m is not None and m.re.groups and m[1] is not None and m[1].isdecimal() else None for m in found]
    if any(d is not None and len(d) > _MAX_DIGITS for d in digits):
        messages.append(f"step numbers have more than {_MAX_DIGITS} digits; steps are numbered by their order instead")
        digits = [None]
    labels = np.arange(len(names)) if None in digits else np.array([int(d or 0) for d in digits], dtype=np.int64)
    if (np.diff(labels) <= 0).any():
        messages.append("step numbers repeat or go back; steps are numbered by their order instead")
        labels = np.arange(len(names))
    return StepWindows(
        labels=labels, names=tuple(names), start_ns=start, end_ns=end, source=source, messages=tuple(messages)
    )


def _outermost(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Which ranges, sorted by start, do not begin well inside an earlier one (1 µs of overlap is let pass)."""
    if not len(start):
        return np.empty(0, dtype=bool)
    before = np.concatenate(([np.iinfo(np.int64).min // 2], np.maximum.accumulate(end)[:-1]))
    return start >= before - 1000


def _whole(events: pd.DataFrame) -> StepWindows:
    """No step annotation: the whole trace as one step, or none where there is no event."""
    spans = events[~in_categories(events, ("Trace", "overhead"))]
    if not len(spans):
        none = np.empty(0, dtype=np.int64)
        return StepWindows(
            labels=none,
            names=(),
            start_ns=none,
            end_ns=none,
            source="none",
            found=False,
            messages=("the trace holds no events with a duration",),
        )
    start, end = int(spans["ts_ns"].min()), int((spans["ts_ns"] + spans["dur_ns"]).max())
    said = "no step annotation was found (ProfilerStep#N, SGLang or vLLM labels): the whole trace is read as one step; name your own with step_pattern="
    return StepWindows(
        labels=np.array([0]),
        names=("whole trace",),
        start_ns=np.array([start]),
        end_ns=np.array([end + 1]),
        source="whole trace",
        found=False,
        messages=(said,),
    )
