"""``no_device_alloc``: in this region no device memory is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark_lab.errors import LabError
from dspark_lab.guards import fake
from dspark_lab.guards.rules import on_cuda
from dspark_lab.guards.sites import Allowed, Finding, GuardError, Rule, found, told

_WAY_OUT = "allocate once outside the region and write in place (out=, copy_, fill_, index_copy_), or capture the region in a CUDA graph"
_COUNTERS = {False: "allocation.all.allocated", True: "num_device_alloc"}


class DeviceAllocGuard:
    """What ``no_device_alloc`` gives: a context manager that keeps what it saw in ``findings``, allowed ones too.

    ``num_untold``: allocations on the device in this region that no torch operation of this thread made.
    """

    def __init__(self, *, allow: Rule | Iterable[Rule] = (), segments_only: bool = False, at_once: bool = True) -> None:
        self.findings: list[Finding] = []
        self.num_untold = 0
        self._allowed = Allowed(allow)
        self._segments_only = segments_only
        self._at_once = at_once
        self._entered: FrameType | None = None
        self.was_entered = False
        self._mode: _Dispatch | None = None

    @property
    def violations(self) -> list[Finding]:
        """The findings that were not allowed."""
        return [f for f in self.findings if not f.allowed]

    def __enter__(self) -> Self:
        if self._mode is not None:
            raise LabError("this guard is open already; make one a region: with no_device_alloc(): …")
        is_fake = fake.is_active()
        if not is_fake and not torch.cuda.is_available():
            raise LabError(
                "no_device_alloc needs a CUDA device or the fake one: with fake_cuda(), no_device_alloc(): …"
            )
        if is_fake and self._segments_only:
            raise LabError("segments_only=True needs a CUDA device: the fake one has no caching allocator.")
        self._entered, self.was_entered = sys._getframe(1), True
        self._counter = None if is_fake else _COUNTERS[self._segments_only]
        self._at_start = self._told = self.count()
        self._mode = _Dispatch(self)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
        entered, self._entered = self._entered, None
        self.num_untold += self.count() - self._told
        if error is not None:
            return
        if self.violations:
            raise GuardError(told(self.violations, "device allocations"), self.violations)
        if self.num_untold > 0 and entered is not None:
            noun = "new segments" if self._segments_only else "allocations"
            raise GuardError(
                f"{entered.f_code.co_filename}:{entered.f_lineno} ({entered.f_code.co_name}): {self.num_untold} device"
                f" {noun} in the region that no torch operation of this thread made (an extension, a library's workspace,"
                f" another thread). Way out: {_WAY_OUT}."
            )

    def count(self) -> int:
        """Allocations of the current device so far; 0 on the fake one, where storages are compared."""
        return int(torch.cuda.memory_stats().get(self._counter, 0)) if self._counter else 0

    def watch(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = self.count()
        self.num_untold += before - self._told
        known = {fake.storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        after = self._told = self.count()
        fresh = [t for t in tree_leaves(out) if on_cuda(t) and fake.storage_of(t) not in known]
        if after > before or (self._counter is None and fresh):
            self._report(func, fresh, max(after - before, len(fresh) if self._counter is None else 0))
        return out

    def _report(self, func: Any, fresh: list[Tensor], calls: int) -> None:
        sizes = " and ".join(f"{t.untyped_storage().nbytes():,}" for t in fresh if not fake.is_fake(t))
        sizes = sizes or " and ".join(f"{t.numel() * t.element_size():,}" for t in fresh)
        what = f"a new device tensor of {sizes} bytes" if fresh else "device memory to work in"
        if self._segments_only:
            what += (
                f", for which the driver was asked {calls} times" if calls > 1 else ", for which the driver was asked"
            )
        elif calls > len(fresh):
            what += f" ({calls} allocations)"
        name = func._schema.name.replace("aten::", "aten.")
        finding, frames = found(kind="alloc", name=name, what=what, way_out=_WAY_OUT, until=self._entered)
        may = self._allowed(finding, frames)
        if may:
            finding = Finding(**{**vars(finding), "allowed": True})
        self.findings.append(finding)
        if not may and self._at_once:
            raise GuardError(told([finding], ""), [finding])


def no_device_alloc(
    allow: Rule | Iterable[Rule] = (), *, segments_only: bool = False, at_once: bool = True
) -> DeviceAllocGuard:
    """In this region no device memory is asked for: ``with no_device_alloc(): graph.replay()``.

    By default a request to PyTorch's caching allocator counts, also where it is served from its cache: a step that allocates
    nothing can be captured, and cannot fail or stall on memory. Lines are named for the torch operations of the thread that enters;
    what others ask of the current device meanwhile is counted at the end.

    Args:
        allow: as in ``no_host_sync``.
        segments_only: count only what made the allocator ask the driver (cudaMalloc, cuMemMap): the calls that synchronise.
        at_once: raise at the first one, right after the offending operation; False runs the region and lists every place.

    Raises:
        GuardError: with file, line, the call, bytes and the way out.
        LabError: there is neither a GPU nor a fake device.
    """
    return DeviceAllocGuard(allow=allow, segments_only=segments_only, at_once=at_once)


class _Dispatch(TorchDispatchMode):
    def __init__(self, guard: DeviceAllocGuard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.guard.watch(func, args, kwargs or {})
