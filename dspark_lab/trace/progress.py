"""Where long work on traces stands, told to who listens in the same thread; they may end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_heard: ContextVar[Callable[[str, float], None] | None] = ContextVar("heard", default=None)


class Stopped(BaseException):
    """Raised by a listener to end the work; no error, so that nothing on the way takes it for a trace that cannot be read."""


@contextmanager
def listening(heard: Callable[[str, float], None]) -> Iterator[None]:
    """Calls ``heard(what, fraction)`` for what this thread does within; ``fraction`` is of this piece of work, from 0 to 1."""
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


def tell(what: str, fraction: float) -> None:
    """Says that ``what`` is done by ``fraction``; nobody may listen."""
    if (heard := _heard.get()) is not None:
        heard(what, fraction)
