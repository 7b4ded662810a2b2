"""What is changed in a trace before it is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
