"""Where in the user's program something happened, and whether that place may do it."""

from __future__ import annotations

import fnmatch
import linecache
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from dspark_lab.errors import LabError

_HERE = os.path.dirname(os.path.abspath(__file__))
_SKIPPED = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    _HERE + os.sep,
    os.path.join(os.path.dirname(_HERE), "testing") + os.sep,
    os.sep.join(("", "site-packages", "triton", "")),
)
#: The standard library between a warning of PyTorch's and the guard that hears it.
_WARNINGS = tuple(os.path.join(os.path.dirname(warnings.__file__), name) for name in ("warnings.py", "_py_warnings.py"))
_FILE_PATTERN = re.compile(r"^(?P<file>.+\.pyi?|<.+>)(?::(?P<line>\d+))?$")
_LONGEST = 100


class GuardError(AssertionError):
    """A guarded region did what it must not. ``findings`` holds every place that was seen, allowed ones left out."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was seen in a guarded region.

    Attributes:
        kind: ``sync``, ``event_wait``, ``pageable_staging`` (host waits) or ``alloc``.
        call: the expression in the user's code.
        what: what it does; ``way_out``: what to do instead.
        file, line, function: innermost frame outside torch and the guard.
        allowed: it was let pass.
    """

    kind: str
    call: str
    what: str
    way_out: str
    file: str
    line: int
    function: str
    allowed: bool = False

    @property
    def place(self) -> str:
        """``file:line (function)``, the file relative to the working folder where it lies below it."""
        try:
            shown = Path(self.file).relative_to(Path.cwd()).as_posix()
        except ValueError:
            shown = self.file
        return f"{shown}:{self.line} ({self.function})"

    def __str__(self) -> str:
        return f"{self.place}: {self.call}: {self.what}. Way out: {self.way_out}."


Rule = str | Callable[[Finding], bool]


class Allowed:
    """The places that may do it: ``"loop.py:123"``, ``"loop.py"``, ``"engine/*.py"``, ``"function"``, ``"Class.method"``, or a callable on the finding.

    A pattern allows what happens in that place or in anything called from it inside the region.
    """

    def __init__(self, rules: Rule | Iterable[Rule]) -> None:
        self.rules: tuple[Rule, ...] = (rules,) if isinstance(rules, str) or callable(rules) else tuple(rules)
        for rule in self.rules:
            if not (isinstance(rule, str) and rule) and not callable(rule):
                raise LabError(
                    f"allow={rule!r} is no place; legal: 'file.py:123', 'file.py', a function's name, or a callable on the finding."
                )

    def __call__(self, finding: Finding, frames: Sequence[FrameType]) -> bool:
        return any(
            any(_is_at(frame, rule) for frame in frames) if isinstance(rule, str) else bool(rule(finding))
            for rule in self.rules
        )


def _is_at(frame: FrameType, rule: str) -> bool:
    code = frame.f_code
    of_file = _FILE_PATTERN.match(rule)
    if of_file:
        path, wanted = code.co_filename.replace(os.sep, "/"), of_file["file"]
        here = path == wanted or fnmatch.fnmatch(path, f"*/{wanted}")
        return here and (of_file["line"] is None or int(of_file["line"]) == frame.f_lineno)
    name = code.co_qualname.replace("<locals>.", "")
    return name == rule or name.endswith(f".{rule}")


def user_frames(until: FrameType | None = None) -> list[FrameType]:
    """Frames of the user's code, innermost first, up to the one that entered the guard (included)."""
    return list(_walk(until))


def _walk(until: FrameType | None) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        if frame is until:
            return
        frame = frame.f_back


def is_user_file(path: str) -> bool:
    """Whether a frame of this file is the user's, not torch's, Triton's, the guard's or the interpreter's."""
    return not (
        path.startswith(("<frozen", *_SKIPPED[:3]))
        or _SKIPPED[3] in path
        or path in _WARNINGS
        or path.endswith(os.sep + "contextlib.py")
    )


def expression(frame: FrameType) -> str:
    """Source text of the expression that a frame is at; empty where there is no source."""
    code = frame.f_code
    positions = list(code.co_positions())[frame.f_lasti // 2] if frame.f_lasti >= 0 else (None,) * 4
    first, last, start, end = positions
    line = linecache.getline(code.co_filename, frame.f_lineno)
    if first is None or last is None or start is None or end is None:
        return _short(line)
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    if not all(lines):
        return _short(line)
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return _short(b"".join(lines).decode(errors="replace"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def found(
    *, kind: str, name: str, what: str, way_out: str, until: FrameType | None = None
) -> tuple[Finding, list[FrameType]]:
    """The finding for what is happening right now, and the user's frames around it. ``name`` stands in where there is no source."""
    frames = user_frames(until)
    if not frames:
        return Finding(kind=kind, call=name, what=what, way_out=way_out, file="<unknown>", line=0, function="?"), frames
    at = frames[0]
    return (
        Finding(
            kind=kind,
            call=expression(at) or name,
            what=what,
            way_out=way_out,
            file=at.f_code.co_filename,
            line=at.f_lineno,
            function=at.f_code.co_qualname.replace("<locals>.", ""),
        ),
        frames,
    )


def told(findings: Sequence[Finding], noun: str) -> str:
    """One line for one place; for several a head line and one line a place, the most frequent first."""
    places = Counter(findings)
    if len(places) == 1:
        ((finding, count),) = places.items()
        return f"{finding}" if count == 1 else f"{finding} ({count} times)"
    lines = [f"  {count}x {finding}" for finding, count in places.most_common()]
    return "\n".join([f"{len(findings)} {noun} at {len(places)} places:", *lines])
