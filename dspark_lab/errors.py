"""Errors that a user can mend: each names the value given, the legal ones and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class LabError(ValueError):
    """An error that a user can mend. Its text is one line; the command line prints it and exits with 2."""


class RunFailed(LabError):
    """A job ended before its time; the text names the rank, the phase and the log."""


class RanksDisagree(RunFailed):
    """Ranks are about to do different things, which would hang; the text names the first differing value and the rank."""


def nearest(value: object, legal: Iterable[object]) -> str:
    """Returns " Did you mean 'x'?" for the legal value closest to ``value``, or an empty string."""
    close = get_close_matches(str(value), [str(x) for x in legal], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, value: object, legal: Iterable[object]) -> LabError:
    """The error for a value that is none of the legal ones."""
    legal = list(legal)
    names = ", ".join(str(x) for x in legal)
    return LabError(f"{what}={value!r} is not known; legal: {names}.{nearest(value, legal)}")
