"""What is changed in a trace before it is replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from dspark_lab.errors import LabError

DROPS: dict[str, tuple[str, ...]] = {
    "sync": ("sync", "blocking_copy"),
    "event_wait": ("event_wait",),
    "all": ("sync", "blocking_copy", "event_wait"),
    "none": (),
}


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What is changed before the replay.

    drop: kinds of waits that no longer hold the host; drop_site restricts them to one site (and takes any kind). Kernels and copies whose
    names match are removed, with their launch call where nothing else hangs on it. Factors scale kernels by pattern, the host's time
    between calls, and the calls themselves (``launch_cost``: the profiler's cost on host calls, where you know it). ranks: only on these.
    """

    drop: tuple[str, ...] = ()
    drop_site: str | None = None
    drop_kernel: str | None = None
    drop_copy: str | None = None
    scale_kernel: Mapping[str, float] = field(default_factory=dict)
    scale_host: float = 1.0
    launch_cost: float = 1.0
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        said = []
        if self.drop_site is not None:
            said.append(f"no waiting at {self.drop_site}")
        elif self.drop:
            said.append(f"no waiting of kind {', '.join(self.drop)}")
        said += [
            f"without {what} {p}"
            for what, p in (("kernel", self.drop_kernel), ("copy", self.drop_copy))
            if p is not None
        ]
        said += [f"kernels {p} × {f:g}" for p, f in self.scale_kernel.items()]
        said += [
            f"{what} × {f:g}"
            for what, f in (("host time", self.scale_host), ("call cost", self.launch_cost))
            if f != 1.0
        ]
        on = "" if self.ranks is None else f" on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return "; ".join(said) + on if said else "unedited"


def check_edit(
    *, texts: Mapping[str, Any], scale_kernel: Any, factors: Mapping[str, Any], ranks: Any, num_edits: Any
) -> None:
    """Raises `LabError` for the first argument of an edit that is of no use, before a trace is read."""
    for what, text in texts.items():
        if not isinstance(text, str | None):
            raise LabError(f"{what}={text!r:.80} is no text; give a name or a part of one.")
    if not isinstance(scale_kernel, Mapping | None) or not all(isinstance(k, str) for k in scale_kernel or {}):
        raise LabError(
            f"scale_kernel={scale_kernel!r:.80} is no table; give {{'gemm': 0.5}}: a regular expression, a factor."
        )
    named = {f"scale_kernel[{k!r}]": f for k, f in (scale_kernel or {}).items()}
    for what, factor in (dict(factors) | named).items():
        number = float(factor) if isinstance(factor, Real) and not isinstance(factor, bool) else math.nan
        if not 0 <= number < math.inf:
            raise LabError(f"{what}={factor!r:.80} is no factor; give a number from 0 on.")
    if ranks is not None and (isinstance(ranks, str) or not isinstance(ranks, Sequence) or not len(ranks)):
        raise LabError(f"ranks={ranks!r:.80} is no list of ranks; give [0], or None for all.")
    if isinstance(num_edits, bool) or not isinstance(num_edits, Integral) or num_edits < 0:
        raise LabError(f"num_edits={num_edits!r:.80} is no number of edits; give a whole number, 0 for none.")
