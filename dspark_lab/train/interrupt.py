"""`HeldInterrupt`: Ctrl-C waits for the end of the step at hand, so that a state is saved whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """A context in which the first SIGINT is kept until `let_go`, and a second one interrupts at once.

    Signals come to the main thread alone: in others, and where somebody handles SIGINT in a way of their own, nothing is held.
    """

    def __init__(self) -> None:
        self.pending, self._holds = False, False

    def __enter__(self) -> HeldInterrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hold)
            self._holds = True
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.let_go()

    def let_go(self) -> None:
        """Raises KeyboardInterrupt where one was held."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt

    def _hold(self, *_: int | FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
