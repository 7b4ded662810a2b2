"""``no_host_sync``: in this region the host must not wait for the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_lab.errors import LabError
from dspark_lab.guards import watch
from dspark_lab.guards.rules import DATA_TO_DEVICE, KEEP_ON_DEVICE, Effect, effect_of, on_cuda
from dspark_lab.guards.sites import Allowed, Finding, GuardError, Rule, found, told

_SEEN_BY_TORCH = Effect("sync", "synchronises with the device, as PyTorch's own watch reports", KEEP_ON_DEVICE)


class HostSyncGuard:
    """What ``no_host_sync`` gives: a context manager that keeps what it saw in ``findings``, allowed ones too.

    ``watch_only`` makes one that sees the calls that wait by name and PyTorch's own watch, costs next to nothing and never fails.
    """

    def __init__(
        self,
        *,
        allow: Rule | Iterable[Rule] = (),
        allow_event_wait: bool = True,
        allow_pageable_staging: bool = True,
        at_once: bool = True,
        watch_only: bool = False,
    ) -> None:
        self.findings: list[Finding] = []
        self._allowed = Allowed(allow)
        kinds = {"event_wait": allow_event_wait, "pageable_staging": allow_pageable_staging}
        self._allowed_kinds = {kind for kind, yes in kinds.items() if yes}
        self._at_once = at_once
        self._watch_only = watch_only
        self._modes: list[Any] = []
        self._entered: FrameType | None = None
        self.was_entered = False
        self._depth = 0
        self._told = False
        """Whether the outermost torch call that runs now has been reported: what it does inside is the same wait."""

    @property
    def violations(self) -> list[Finding]:
        """The findings that were not allowed."""
        return [f for f in self.findings if not f.allowed]

    def counts(self) -> dict[str, int]:
        """Findings by kind: ``sync``, ``event_wait``, ``pageable_staging``; allowed ones too."""
        return dict(Counter(f.kind for f in self.findings))

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise LabError("this guard is open already; make one a region: with no_host_sync(): …")
        self._entered, self.was_entered = sys._getframe(1), True
        watch.enter(self)
        if not self._watch_only:
            self._modes = [_Dispatch(self), _Function(self)]
            for mode in self._modes:
                mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self._modes = []
        watch.leave(self)
        self._entered = None
        if error is None and self.violations and not self._watch_only:  # collected, or swallowed on the way up
            raise GuardError(told(self.violations, "host synchronisations"), self.violations)

    def report(self, name: str, effect: Effect) -> None:
        """Keep what is about to happen, and raise where it must not."""
        if self._told:
            return
        self._told = self._depth > 0
        finding, frames = found(
            kind=effect.kind, name=name, what=effect.what, way_out=effect.way_out, until=self._entered
        )
        may = effect.kind in self._allowed_kinds or self._allowed(finding, frames)
        if may:
            finding = Finding(**{**vars(finding), "allowed": True})
        self.findings.append(finding)
        if not may and self._at_once and not self._watch_only:
            raise GuardError(told([finding], ""), [finding])

    def call(self, run: Callable[[], Any], before: tuple[str, Effect] | None = None) -> Any:
        """Run one outermost call; whatever it does inside is one finding at most."""
        outer, self._told = self._told, False
        self._depth += 1
        try:
            if before is not None:
                self.report(*before)
            return run()
        finally:
            self._told = outer
            self._depth -= 1

    def on_wait(self, name: str, effect: Effect, run: Callable[[], Any]) -> Any:
        return self.call(run, (name, effect))

    def on_torch_warning(self) -> None:
        self.report("a CUDA call", _SEEN_BY_TORCH)


def no_host_sync(
    allow: Rule | Iterable[Rule] = (),
    *,
    allow_event_wait: bool = True,
    allow_pageable_staging: bool = True,
    at_once: bool = True,
) -> HostSyncGuard:
    """In this region the host must not wait for the device: ``with no_host_sync(): engine.step()``.

    Watches the thread that enters it. On a GPU PyTorch's sync debug mode stands behind it (saved before, restored after) for
    calls that it has no name for; on the fake device (``fake_cuda``) there are its own rules alone.

    Args:
        allow: places that may wait: ``"loop.py:123"``, ``"loop.py"``, a function's name, a callable on the ``Finding``.
            What is called from an allowed place is allowed too.
        allow_event_wait: let ``Event.synchronize`` pass; a loop that runs ahead waits for an old event by right. Counted either way.
        allow_pageable_staging: let non-blocking copies from pageable memory pass. Counted either way.
        at_once: raise at the first one, in the offending line; False runs the region to its end and lists every place.

    Raises:
        GuardError: with file, line, the call, what it does and the way out.
    """
    return HostSyncGuard(
        allow=allow,
        allow_event_wait=allow_event_wait,
        allow_pageable_staging=allow_pageable_staging,
        at_once=at_once,
    )


_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


class _Function(TorchFunctionMode):
    """Sees calls as the user wrote them; needed for factories from Python data, whose copy is hidden from dispatch modes."""

    def __init__(self, guard: HostSyncGuard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", str(func))

        def run() -> Any:
            out = func(*args, **kwargs)
            if func in _FROM_DATA and on_cuda(out) and not on_cuda(_data(func, args, kwargs)):
                self.guard.report(name, DATA_TO_DEVICE)  # the device came from a default, after the fact
            return out

        hidden = func in _FROM_DATA and _to_cuda(func, args, kwargs)
        return self.guard.call(run, (name, DATA_TO_DEVICE) if hidden else None)


def _data(func: Any, args: Any, kwargs: Any) -> Any:
    position = 1 if func is torch.Tensor.new_tensor else 0
    return args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))


def _to_cuda(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a factory from data is asked for a CUDA tensor, and the data is not there yet."""
    device = kwargs.get("device", args[2] if func is torch.as_tensor and len(args) > 2 else None)
    if device is None and func is torch.Tensor.new_tensor:
        device = args[0].device
    if device is None or on_cuda(_data(func, args, kwargs)):
        return False
    return torch.device(device).type == "cuda"


class _Dispatch(TorchDispatchMode):
    """Sees what PyTorch does below, whoever asked for it."""

    def __init__(self, guard: HostSyncGuard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        effect = effect_of(func, args, kwargs)
        if effect is not None:
            self.guard.report(func._schema.name.replace("aten::", "aten."), effect)
        if is_composite(func):  # under inference_mode composite operations arrive whole: look inside
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is made of others, which can be run in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
