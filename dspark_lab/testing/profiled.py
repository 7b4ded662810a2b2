"""Guards that profile their region and read the trace: how many kernels, how far ahead the host is, the same kernels in graphs.

The region runs under ``torch.profiler``, which slows host calls: a launch lead measured here is a lower bound of the real one.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import torch

from dspark_lab.device import one_cycle
from dspark_lab.errors import LabError
from dspark_lab.guards import GuardError, HostSyncGuard
from dspark_lab.guards.sites import is_user_file
from dspark_lab.trace import Trace, TraceSet, open_trace

_SHOWN = 8


class ProfiledGuard:
    """A region under the profiler. ``trace`` is there after it; subclasses judge it."""

    name: ClassVar[str]
    stacks: ClassVar[bool] = False
    step_pattern: str | None = None

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.was_entered = False
        self._num_steps = 0

    def __enter__(self) -> Self:
        if not torch.cuda.is_available():
            raise LabError(f"{self.name} reads a profile of the device: needs a CUDA device.")
        if self.was_entered:
            raise LabError(f"{self.name} is a region's own; make one for each: with {self.name}(…): …")
        frame = sys._getframe(1)
        self.was_entered = True
        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        del frame
        self._waits = HostSyncGuard(watch_only=True)
        torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
            with_stack=self.stacks,
        )
        with one_cycle():
            self._profiler.__enter__()
        self._waits.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._waits.__exit__(kind, error, tb)
        torch.cuda.synchronize()
        self._profiler.__exit__(kind, error, tb)
        if error is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "region.pt.trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = open_trace(path, step_pattern=self.step_pattern)
        del self._profiler
        assert isinstance(trace, Trace)
        self.trace = trace
        self.judge(trace)

    def judge(self, trace: Trace) -> None:
        raise NotImplementedError

    def step(self) -> AbstractContextManager[None]:
        """Marks one step of the region: ``with guard.step(): engine.step()``."""
        self._num_steps += 1
        return _step(self._num_steps - 1)

    def fail(self, message: str) -> None:
        raise GuardError(f"{self.place}: {message}", self._waits.findings)


@contextmanager
def _step(number: int) -> Iterator[None]:
    with torch.profiler.record_function(f"ProfilerStep#{number}"):
        yield


class max_kernels(ProfiledGuard):
    """At most ``n`` kernels are run in this region, those inside replayed graphs counted one by one: ``with max_kernels(600): engine.step()``.

    Raises:
        GuardError: how many there were, the most frequent ones and the functions (file and line of their def) that launched most.
        LabError: there is no CUDA device.
    """

    name = "max_kernels"
    stacks = True

    def __init__(self, n: int) -> None:
        if n < 0:
            raise LabError(f"max_kernels({n}): the number must be 0 or more.")
        super().__init__()
        self.n = n

    def judge(self, trace: Trace) -> None:
        kernels = trace.kernels()
        if len(kernels) <= self.n:
            return
        names = Counter(kernel_name(k) for k in kernels["name"]).most_common(_SHOWN)
        places = launching_functions(trace, kernels).most_common(_SHOWN)
        in_graphs = int(kernels["in_graph"].astype(bool).sum())
        lines = [
            f"{len(kernels)} kernels were run, at most {self.n} allowed ({in_graphs} of them inside graphs). Functions that launched most:"
        ]
        lines += [f"  {count}x {place}" for place, count in places]
        lines += ["most frequent:", *(f"  {count}x {kernel}" for kernel, count in names)]
        self.fail("\n".join(lines))


class min_launch_lead_us(ProfiledGuard):
    """In the steady state of this region the host runs ahead of the device by at least ``x`` µs.

    ``with min_launch_lead_us(100) as loop: for …: with loop.step(): engine.step()``. The median over steps counts, without the
    first ``skip``. Launch lead: start of the first kernel of a step's first graph launch (its first kernel where there is no graph)
    minus the end of the launch call. Steps that the engine labels itself, as SGLang and vLLM do, need no mark.

    Raises:
        GuardError: the median lead, and the lines where the host waited.
        LabError: no CUDA device, or no steps in the region.
    """

    name = "min_launch_lead_us"

    def __init__(self, x: float, *, skip: int = 2, step_pattern: str | None = None) -> None:
        super().__init__()
        self.x, self.skip, self.step_pattern = x, skip, step_pattern

    def judge(self, trace: Trace) -> None:
        if not trace.step_windows.found:
            raise LabError("min_launch_lead_us: no steps in the region; mark them: with guard.step(): engine.step()")
        leads = trace.steps()["launch_lead_us"].iloc[self.skip :].dropna()
        if not len(leads):
            raise LabError(
                f"min_launch_lead_us: {len(trace.step_windows)} steps in the region and none with a launch after the first {self.skip}; run more."
            )
        lead = float(np.median(leads))
        if lead >= self.x:
            return
        waits = Counter((f.place, f.call, f.what) for f in self._waits.findings).most_common(_SHOWN)
        lines = [f"  {n}x {place}: {call}: {what}" for (place, call, what), n in waits]
        if not lines:
            lines = [
                "  no call that waits was seen: the host is slower than the device (launches, Python), or memory copies held it"
            ]
        self.fail(
            "\n".join(
                [
                    f"launch lead {lead:.0f} µs (median of {len(leads)} steps), at least {self.x:g} µs wanted. The host waited at:",
                    *lines,
                ]
            )
        )


class same_kernels_as(ProfiledGuard):
    """The graphs replayed in this region hold the same kernels as those of a reference trace.

    Replays are told apart by the kernels in them (names without template arguments and parameters); how often each is replayed does not
    count. What lies outside graphs is not compared.

    Args:
        trace: a ``Trace``, or anything that ``open_trace`` takes for one rank.
        ordered: their order on the device must be the same too.

    Raises:
        GuardError: the kernels that are more or fewer, replay by replay.
        LabError: no CUDA device, or no graph replay in the reference.
    """

    name = "same_kernels_as"

    def __init__(self, trace: Any, *, ordered: bool = False) -> None:
        super().__init__()
        reference = open_trace(trace)
        if isinstance(reference, TraceSet):
            raise LabError(f"same_kernels_as takes one rank's trace, not {reference!r}; choose one: traces[0].")
        self.reference, self.ordered = replays(reference), ordered
        if not self.reference:
            raise LabError(f"same_kernels_as: {reference.name} holds no graph replay to compare with.")

    def judge(self, trace: Trace) -> None:
        differences = replay_differences(self.reference, replays(trace), ordered=self.ordered)
        if differences:
            self.fail(
                "\n".join(["the graphs hold other kernels than the reference:", *(f"  {d}" for d in differences)])
            )


_WRAPPED = re.compile(r"^(?:void|int|float|double|bool) (?=\S)")


def kernel_name(name: Any) -> str:
    """A kernel's name without template arguments, parameters and return type: ``at::native::elementwise_kernel``."""
    text = _WRAPPED.sub("", str(name).replace("(anonymous namespace)", "{anonymous}"))
    out, depth = [], 0
    for c in text:
        if c == "<":
            depth += 1
        elif c == ">":
            depth = max(0, depth - 1)
        elif c == "(" and depth == 0:
            break
        elif depth == 0:
            out.append(c)
    return "".join(out).strip() or str(name)


def replays(trace: Trace) -> list[tuple[str, ...]]:
    """The kernels of each different graph replay in order of their start, the most frequent replay first."""
    kernels = trace.kernels()
    inside = kernels[kernels["in_graph"].astype(bool)]
    if not len(inside):
        return []
    names = inside.sort_values("ts_ns").groupby("correlation", sort=False)["name"]
    return [kinds for kinds, _ in Counter(tuple(kernel_name(k) for k in g) for _, g in names).most_common()]


def replay_differences(
    reference: list[tuple[str, ...]], found: list[tuple[str, ...]], *, ordered: bool = False
) -> list[str]:
    """What differs between two lists of replays, one line a kernel; empty where they are the same."""
    key = (lambda r: r) if ordered else (lambda r: tuple(sorted(r)))
    wanted, seen = {key(r): r for r in reference}, {key(r): r for r in found}
    missing = [r for k, r in wanted.items() if k not in seen]
    extra = [r for k, r in seen.items() if k not in wanted]
    lines: list[str] = []
    for replay in missing:
        if not extra:
            lines.append(f"a replay of {len(replay)} kernels, first {replay[0]}, is not there")
            continue
        other = min(extra, key=lambda r: _distance(replay, r))
        extra.remove(other)
        lines += _compared(replay, other)
    lines += [f"a replay of {len(r)} kernels, first {r[0]}, is not in the reference" for r in extra]
    return lines


def _distance(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    one, two = Counter(a), Counter(b)
    return sum(((one - two) + (two - one)).values())


def _compared(reference: tuple[str, ...], found: tuple[str, ...]) -> list[str]:
    head = f"in the replay of {len(reference)} kernels ({len(found)} here):"
    one, two = Counter(reference), Counter(found)
    lines = [f"-{n} {k}" for k, n in (one - two).most_common()] + [f"+{n} {k}" for k, n in (two - one).most_common()]
    if not lines:
        at = next(i for i, (a, b) in enumerate(zip(reference, found, strict=True)) if a != b)
        lines = [f"another order from kernel {at} on: {reference[at]} expected, {found[at]} found"]
    return [head, *lines]


def launching_functions(trace: Trace, kernels: pd.DataFrame) -> Counter[str]:
    """Kernels by the user's function that launched them, as ``file.py(line of its def): name``, where stacks were recorded."""
    frames = trace.frames()
    own = frames[[_is_own(n) for n in frames["name"].astype(str)]] if len(frames) else frames
    starts = own["ts_ns"].to_numpy() if len(own) else np.empty(0, np.int64)
    ends = starts + (own["dur_us"].to_numpy() * 1000).astype(np.int64) if len(own) else starts
    names = own["name"].astype(str).tolist() if len(own) else []
    counts: Counter[str] = Counter()
    for at, n in zip(*np.unique(kernels["call_ts_ns"].to_numpy(), return_counts=True), strict=True):
        inside = np.flatnonzero((starts <= at) & (ends >= at))
        place = names[int(inside[-1])] if len(inside) else "no function known"
        counts[place] += int(n)
    return counts


def _is_own(frame: str) -> bool:
    """Whether a recorded Python frame is the user's: ``file.py(12): function``."""
    path = frame.split("(", 1)[0]
    return (
        frame.count("(") > 0
        and path.endswith(".py")
        and is_user_file(path)
        and not path.startswith(("torch/", "dspark_lab/guards/", "dspark_lab/testing/", "contextlib.py"))
        and "/torch/" not in path
    )
