"""`Timed`: a dispatcher with its times written down: how long a rank waited for the slowest, then how long the exchange took."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark_lab.device import synchronize
from dspark_lab.ep.dispatch import Dispatched, Dispatcher
from dspark_lab.ep.groups import RankGroup

KINDS = ("wait", "dispatch", "experts", "combine")
MAX_SPANS = 2000


@dataclass(kw_only=True)
class ExchangeTimes:
    """Of one rank: total microseconds by kind, and spans of the last steps on the clock of this host."""

    ranks: RankGroup
    device: torch.device
    total_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    num_exchanges: int = 0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """(kind, start µs, µs), from the end of the first wait on: the moment at which the ranks were together."""
    _zero: Tensor | None = None
    _origin_ns: int = 0

    def now(self) -> int:
        synchronize(self.device)
        return time.perf_counter_ns()

    def wait(self) -> int:
        """Until all ranks are here; returns the time then."""
        start = self.now()
        if self.ranks.size > 1:
            if self._zero is None:
                self._zero = torch.zeros(1, device=self.device)
            self.ranks.all_reduce(self._zero)
        end = self.now()
        self.note("wait", start, end)
        return end

    def note(self, kind: str, start: int, end: int) -> None:
        self._origin_ns = self._origin_ns or end
        self.total_us[kind] += (end - start) / 1e3
        if len(self.spans) < MAX_SPANS:
            self.spans.append((kind, (start - self._origin_ns) / 1e3, (end - start) / 1e3))

    def start_over(self) -> None:
        """Forgets all of it, once warm."""
        self.total_us, self.spans = dict.fromkeys(KINDS, 0.0), []
        self.num_exchanges, self._origin_ns = 0, 0

    def report(self, num_steps: int) -> dict[str, Any]:
        """``us_a_step`` by kind, eager and with every exchange synchronised; ``spans``: [kind, start µs, µs] from
        ``origin_us`` on, on the clock that all ranks of machine number ``node`` share."""
        per_step = {kind: total / max(num_steps, 1) for kind, total in self.total_us.items()}
        where = {"node": int(os.environ.get("GROUP_RANK", "0")), "origin_us": self._origin_ns / 1e3}
        return {"us_a_step": per_step, "spans": [list(s) for s in self.spans], **where}


class Timed:
    """``inner`` with both calls timed. Every rank must be timed: each exchange begins with a meeting of all."""

    local_table = None

    def __init__(self, inner: Dispatcher, times: ExchangeTimes) -> None:
        self.inner, self.times, self._experts_from = inner, times, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, count: Tensor | None) -> Dispatched:
        start = self.times.wait()
        handle = self.inner.dispatch(x, topk_ids, topk_weights, count)
        self._experts_from = self.times.now()
        self.times.note("dispatch", start, self._experts_from)
        return handle

    def combine(self, y: Tensor, handle: Dispatched) -> Tensor:
        self.times.note("experts", self._experts_from, self.times.now())
        start = self.times.wait()
        y = self.inner.combine(y, handle)
        self.times.note("combine", start, self.times.now())
        self.times.num_exchanges += 1
        return y
