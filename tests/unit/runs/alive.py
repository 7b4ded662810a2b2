"""Which processes of a job are alive. All of them have its folder on their command line, orphans too."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def alive(out: Path) -> list[str]:
    """Command lines of the processes of jobs below ``out``, agents and ranks; not of those that have ended and wait to be reaped."""
    lines = []
    for p in psutil.process_iter():
        try:
            line = " ".join(p.cmdline())
            if str(out) in line and p.status() != psutil.STATUS_ZOMBIE:
                lines.append(line)
        except psutil.Error:
            continue
    return lines


def begin(out: Path) -> bool:
    """Whether a process of a job below ``out`` comes up in time; without one, that none is left would say nothing."""
    return _within(20, lambda: bool(alive(out)))


def all_end(out: Path) -> bool:
    """Whether none is left after a moment."""
    return _within(5, lambda: not alive(out))


def _within(seconds: float, holds) -> bool:
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return held
