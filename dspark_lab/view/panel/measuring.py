"""A job of the panel: started, watched, stopped; what it measured is handed back when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.view.panel import reasons
from dspark_lab.view.panel.board import Board
from dspark_lab.view.panel.frame import Frame
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.watch import Watch


class Measuring:
    """One job at a time. ``start_job`` makes it; ``ended(runs, cfg, stopped)`` is called once at its end, ``offer()`` where it was lost."""

    def __init__(
        self, guard: Guard, frame: Frame, ended: Callable[[list[Run], LabConfig, bool], None], *, offer: Callable[[], None]
    ) -> None:  # fmt: skip
        self.start_job: Callable[..., Any] = _start_sweep
        self._guard, self._frame, self._done, self._offer = guard, frame, ended, offer
        self._job: Any = None
        self._watch: Watch | None = None

    @property
    def running(self) -> bool:
        return self._watch is not None and not self._watch.done

    def start(self, cfg: LabConfig, **options: Any) -> None:
        """Starts a job; `watch` then follows it. Raises `LabError` where one runs already."""
        if self.running:
            raise LabError("a job runs already; wait for it, or press Stop.")
        self._job = self.start_job(cfg, **options)
        blocks = {n: options[n] for n in ("repeats", "processes")}
        self._watch = Watch(
            self._job, tick=lambda p: self._frame.show_progress(p, **blocks), end=lambda p: self._ended(p, cfg), broken=self._broke
        )  # fmt: skip

    def watch(self) -> None:
        """Begins to look at the job; returns at once."""
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> None:
        """Tells the job to end. Raises `LabError` where none runs."""
        if not self.running:
            raise LabError("nothing runs; there is nothing to stop.")
        self._frame.say("stopping …")
        threading.Thread(target=self._guard.aside(self._job.stop), daemon=True).start()

    def wait(self, timeout: float | None) -> None:
        """Waits for the job. Raises `LabError` after ``timeout`` seconds."""
        if self._watch is not None and not self._watch.wait(timeout):
            raise LabError(f"the job still runs after {timeout} s; wait longer, or stop() it.")

    def _ended(self, progress: Any, cfg: LabConfig) -> None:
        """Hands back what was measured; a failure turns red."""
        runs, stopped = list(self._job.runs or []), progress.state == "stopped"
        if stopped:  # during start-up an arm may be there without a step
            runs = [r for r in runs if len(r.steps) or r.trace_paths]
        if progress.state == "failed":
            error = self._job.error
            self._guard.show(
                error if isinstance(error, BaseException) else LabError(str(error or progress.message)),
                details=str(error),
            )
        self._done(runs, cfg, stopped)

    def _broke(self, error: Exception) -> None:
        """What was to be watched cannot be: red, Run can be pressed again, and a job that nobody sees is told to end."""
        self._offer()
        self._frame.broken()
        self._guard.show(error)
        try:
            self._job.stop()
        except Exception as e:  # said too: its processes may still run
            self._guard.show(e)


def check_ready(board: Board, axes: dict[str, Any]) -> None:
    """Raises `LabError` where nothing can be measured with the toggles as they are."""
    if why := reasons.no_torch():
        raise LabError(f"{why}.")
    if not board.arms:
        raise LabError("no strategy is chosen; tick at least one on the left.")
    if fault := board.fault():
        raise fault
    if not axes:
        raise LabError("with the other settings only one EP size can be measured; the line under EP size says why.")


def _start_sweep(cfg: LabConfig, **options: Any) -> Any:
    from dspark_lab.runs.runner import start_sweep

    return start_sweep(cfg, **options)
