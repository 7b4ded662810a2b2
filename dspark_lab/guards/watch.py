"""What is armed for the whole process while any guard is: PyTorch's sync debug mode, and the calls that wait by name.

Guards belong to a thread. Calls of other threads pass through untouched.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from dspark_lab.guards.rules import Effect

OLDER_EVENT = "wait for an event recorded a step or two ago"
_WAITS = {
    "device": Effect("sync", "waits until the whole device is idle", OLDER_EVENT),
    "stream": Effect("sync", "waits until the stream is idle", OLDER_EVENT),
    "event": Effect("event_wait", "waits for an event", OLDER_EVENT),
}
_SEEN_BY_TORCH = r"called a synchronizing CUDA operation"
_PROTOTYPE = r"Synchronization debug mode is a prototype"


class Watcher(Protocol):
    """A guard that wants to hear of waits of its thread."""

    def on_wait(self, name: str, effect: Effect, run: Callable[[], Any]) -> Any: ...
    def on_torch_warning(self) -> None: ...


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[Watcher] = []


_local = _Local()
_lock = threading.RLock()
_armed: list[_Armed] = []
_count = 0


def enter(watcher: Watcher) -> None:
    """Arms the process for the first guard, and puts ``watcher`` on this thread's stack."""
    global _count
    with _lock:
        if _count == 0:
            _armed.append(_Armed())
        _count += 1
    _local.stack.append(watcher)


def leave(watcher: Watcher) -> None:
    """Takes ``watcher`` off this thread's stack; the last one disarms the process and restores the mode set before."""
    global _count
    _local.stack.remove(watcher)
    with _lock:
        _count -= 1
        if _count == 0:
            _armed.pop().undo()


def is_armed() -> bool:
    """Whether any guard of any thread is open."""
    return _count > 0


def current() -> Watcher | None:
    """The innermost open guard of this thread."""
    return _local.stack[-1] if _local.stack else None


class _Armed:
    """The patches and PyTorch's mode; made once, undone once."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        for owner, name, kind in _targets():
            self._patch(owner, name, kind)
        self._warnings: warnings.catch_warnings[Any] | None = None
        if torch.cuda.is_available() and not _is_faked():
            torch.cuda.init()
            self._arm_torch()

    def _patch(self, owner: Any, name: str, kind: str) -> None:
        before = getattr(owner, name)
        effect, shown = _WAITS[kind], _shown(owner, name)

        @functools.wraps(before)
        def waits(*args: Any, **kwargs: Any) -> Any:
            watcher = current()
            if watcher is None:
                return before(*args, **kwargs)
            return watcher.on_wait(shown, effect, lambda: before(*args, **kwargs))

        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, waits)

    def _arm_torch(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        self._mode = torch.cuda.get_sync_debug_mode()
        warnings.filterwarnings("ignore", message=_PROTOTYPE)
        warnings.filterwarnings("always", message=_SEEN_BY_TORCH)
        warnings.showwarning = heard(warnings.showwarning, self._mode)
        torch.cuda.set_sync_debug_mode("warn")

    def undo(self) -> None:
        if self._warnings is not None:
            torch.cuda.set_sync_debug_mode(self._mode)
            self._warnings.__exit__(None, None, None)
        for owner, name, before in reversed(self._undo):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def heard(before: Callable[..., None], mode: int) -> Callable[..., None]:
    """A ``warnings.showwarning`` that tells this thread's guard of PyTorch's warnings; without a guard ``mode`` decides."""

    def show(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
        if _SEEN_BY_TORCH not in str(message):
            before(message, category, filename, lineno, file, line)
            return
        watcher = current()
        if watcher is not None:
            watcher.on_torch_warning()
        elif mode == 2:
            raise RuntimeError(str(message))
        elif mode == 1:
            before(message, category, filename, lineno, file, line)

    return show


def _targets() -> list[tuple[Any, str, str]]:
    """The calls that wait by name. The C functions below the Python ones, where they are, so that names imported early are seen too."""
    targets: list[tuple[Any, str, str]] = [
        (torch.cuda.Stream, "synchronize", "stream"),
        (torch.cuda.Event, "synchronize", "event"),
    ]
    below = [(torch._C, name) for name in ("_cuda_synchronize", "_accelerator_synchronizeDevice")]
    found = [(owner, name, "device") for owner, name in below if hasattr(owner, name)]
    if not found or _is_faked():  # a build without CUDA, or the fake device
        targets.append((torch.cuda, "synchronize", "device"))
    return targets + found


def _is_faked() -> bool:
    return torch.cuda.synchronize.__module__ != "torch.cuda"


def _shown(owner: Any, name: str) -> str:
    if owner is torch._C or owner is torch.cuda:
        return "torch.cuda.synchronize()"
    return f"torch.cuda.{owner.__name__.removeprefix('Fake')}.{name}()"
