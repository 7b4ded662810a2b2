"""Where the clocks of a trace jump: a host clock that is set while the capture runs, or two clocks that drift apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from dspark_lab.trace.launches import Linked
    from dspark_lab.trace.steps import StepWindows

_Jump = tuple[int, str, int, float]
COLUMNS = ("step", "kind", "ts_ns", "us")
#: Less is rounding.
NOTICE_NS = 1_000
#: A launched event that an idle device leaves for this long was not left: a clock jumped or the capture was paused.
PAUSE_NS = 1_000_000_000


def clock_jumps(linked: Linked, steps: StepWindows) -> pd.DataFrame:
    """One row a place where times cannot all be true, in order of time.

    Columns: step (−1 outside), kind, ts_ns, us (how far, at least). Kinds: ``host goes back`` (correlation ids of a thread rise and its
    clock falls), ``before its launch`` (a device event begins before the call that launched it; a run of them is one row), ``stands still``
    (a device that is idle leaves a launched event for a second or more).
    """
    found = [*_back(linked.calls), *_before_launch(linked), *_still(linked)]
    table = pd.DataFrame(sorted(found, key=lambda r: r[2]), columns=["place", *COLUMNS[1:]])
    table = table.astype({"place": np.int64, "kind": object, "ts_ns": np.int64, "us": float})
    table["step"] = steps.label(table.pop("place").to_numpy()).astype(np.int64)
    return table[list(COLUMNS)]


def _back(calls: pd.DataFrame) -> list[_Jump]:
    ts, tid, place, correlation = (calls[c].to_numpy() for c in ("ts_ns", "tid", "place", "correlation"))
    order = np.lexsort((correlation, tid))
    order = order[correlation[order] > 0]
    back = np.where(tid[order[:-1]] == tid[order[1:]], ts[order[:-1]] - ts[order[1:]], 0)
    hit = np.flatnonzero(back > NOTICE_NS)
    return [
        (int(place[i]), "host goes back", int(ts[i]), us / 1000)
        for i, us in zip(order[hit + 1], back[hit], strict=True)
    ]


def _before_launch(linked: Linked) -> list[_Jump]:
    start, place, call = (linked.device[c].to_numpy() for c in ("ts_ns", "place", "call"))
    known = call >= 0
    early = np.zeros(len(start), dtype=np.int64)
    early[known] = linked.calls["ts_ns"].to_numpy()[call[known]] - start[known]
    hit = np.flatnonzero(early > NOTICE_NS)
    runs = np.split(hit, np.flatnonzero(np.diff(place[hit])) + 1) if len(hit) else []
    return [(int(place[r[0]]), "before its launch", int(start[r[0]]), early[r].max() / 1000) for r in runs]


def _still(linked: Linked) -> list[_Jump]:
    device, calls = linked.device, linked.calls
    if len(device) < 2:
        return []
    start, place, call = (device[c].to_numpy() for c in ("ts_ns", "place", "call"))
    free = np.concatenate((start[:1], np.maximum.accumulate(device["end_ns"].to_numpy())[:-1]))
    arrived = np.where(call >= 0, calls["end_ns"].to_numpy()[call] if len(calls) else 0, start)
    still = start - np.maximum(free, arrived)
    return [(int(place[i]), "stands still", int(start[i]), still[i] / 1000) for i in np.flatnonzero(still >= PAUSE_NS)]
