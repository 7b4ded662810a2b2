"""What ranks tell each other on the host, and how they wait: by polling, with a limit, and naming the rank that did not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dspark_lab.errors import RunFailed

WAIT_LIMIT_S = 60.0
"""From the start of a wait to the error that names who did not come."""
GRACE_S = 2.0
"""Ranks that fail together post where they are within this time of each other."""
SPIN_S, PAUSE_S, POLL_S = 2e-5, 5e-5, 2e-4
"""A wait spins this long, then looks every `PAUSE_S`, and after `RARE_AFTER_S` every `POLL_S`: under a profiler each look at an
event is a record of its own, and a step's wait of a millisecond should be some twenty of them, not a thousand."""
RARE_AFTER_S = 0.05
POST_AFTER_S = 0.5


class Control:
    """A gloo group beside the one that carries data, and the store of the process group for last words."""

    def __init__(self, group: dist.ProcessGroup, *, limit_s: float = WAIT_LIMIT_S) -> None:
        self.group, self.limit_s = group, limit_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._store = PrefixStore("dspark_lab waits", _get_default_store())
        self._num_waits = 0

    def gather(self, values: list[int], what: str) -> list[list[int]]:
        """``values`` of every rank, by rank; all give equally many."""
        out, work = self.start(values)
        self.wait(work.is_completed, what)
        work.wait()
        return out.tolist()

    def start(self, values: list[int]) -> tuple[Tensor, Any]:
        """As `gather`, without a wait: [size, n] int64, filled when the work is completed."""
        mine = torch.tensor([values], dtype=torch.int64)
        out = mine.new_empty(self.size, len(values))
        return out, dist.all_gather_into_tensor(out, mine, group=self.group, async_op=True)

    def objects(self, mine: Any) -> list[Any]:
        """Any picklable value of every rank; off the hot path."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, mine, group=self.group)
        return out

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Polls ``done`` until it is true. Raises `RunFailed` after the limit, with the rank that did not come to ``what``."""
        self._num_waits += 1
        start, posted = time.monotonic(), False
        while not done():
            waited = time.monotonic() - start
            if waited > self.limit_s:
                raise self.nobody_came(what, waited)
            if not posted and waited > POST_AFTER_S:
                self._post(what)
                posted = True
            if waited > SPIN_S:
                time.sleep(PAUSE_S if waited < RARE_AFTER_S else POLL_S)

    def nobody_came(self, what: str, waited: float) -> RunFailed:
        """The error of a wait for ``what`` that had no end: names the ranks that have not posted that they wait too."""
        missing = self._missing(what)
        if missing is None:
            return RunFailed(
                f"the host of rank 0 does not answer, {waited:.0f} s after this rank {self.rank} of {self.size} came to {what}: it "
                "is lost, or the network to it is."
            )
        if not missing:
            return RunFailed(f"all {self.size} ranks wait at {what} for {waited:.0f} s and none of them is late.")
        names = ", ".join(map(str, missing))
        return RunFailed(
            f"rank {names} of {self.size} did not come to {what} within {waited:.0f} s; the other ranks were ended."
        )

    def _missing(self, what: str) -> list[int] | None:
        """Ranks that have not posted that they wait; None where the store does not answer, which rank 0's host keeps."""
        found: list[list[int]] = []

        def ask() -> None:
            self._post(what)
            end = time.monotonic() + GRACE_S
            missing = [r for r in range(self.size) if r != self.rank]
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not self._posted(r)]
                time.sleep(0.05)
            found.append(missing)

        asking = threading.Thread(target=ask, daemon=True)  # a lost host keeps a caller of its store for minutes
        asking.start()
        asking.join(3 * GRACE_S)
        return found[0] if found else None

    def _post(self, what: str) -> None:
        self._store.set(f"{self.rank}", f"{self._num_waits} {what}")

    def _posted(self, rank: int) -> bool:
        """Whether ``rank`` waits too, at this or a later point."""
        if not self._store.check([f"{rank}"]):
            return False
        return int(self._store.get(f"{rank}").split()[0]) >= self._num_waits
