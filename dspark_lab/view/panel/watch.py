"""Watches a job from the kernel without holding it, from a thread."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from dspark_lab.view.panel.turn import TURN

ENDS = ("complete", "stopped", "failed")


class JobLike(Protocol):
    """What the panel needs of a job."""

    runs: Any
    error: str | None

    def poll(self) -> Any: ...
    def stop(self) -> Any: ...


class Watch:
    """Polls ``job``: ``tick(progress)`` at each look, ``end(progress)`` once."""

    def __init__(
        self, job: JobLike, *, tick: Callable[[Any], None], end: Callable[[Any], None], broken: Callable[[Exception], None],
        every_s: float = 0.2,
    ) -> None:  # fmt: skip
        self.job, self.every_s, self.done = job, every_s, False
        self._tick, self._end, self._broken = tick, end, broken

    def start(self) -> None:
        """Begins to look; returns at once. In a thread: the event loop that hears the widgets may end with the page."""
        context = contextvars.copy_context()  # whose cell or click it is
        threading.Thread(target=context.run, args=(self._in_thread,), name="dspark-lab-watch", daemon=True).start()

    def look(self) -> bool:
        """One poll; True once the job has ended and `end` was called."""
        with TURN:
            if self.done:
                return True
            try:
                progress = self.job.poll()
                self._tick(progress)
                if progress.state in ENDS:
                    self.done = True
                    self._end(progress)
            except Exception as e:  # said in red by the panel; a watch that died in silence would look like a hang
                self.done = True
                self._broken(e)
            return self.done

    def wait(self, timeout: float | None) -> bool:
        """Looks until the end or ``timeout`` seconds; for cells and tests, which hold the kernel anyway."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.look():
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(min(self.every_s, 0.05))
        return True

    def _in_thread(self) -> None:
        while not self.look():
            time.sleep(self.every_s)
