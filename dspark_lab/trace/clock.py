"""Where the clocks of a trace jump: a host clock that is set while the capture runs, or two clocks that drift apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from dspark_lab.trace.launches import Linked
    from dspark_lab.trace.steps import StepWindows

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
    calls, device = linked.calls, linked.device
    call_ns, call_place = calls["ts_ns"].to_numpy(), calls["place"].to_numpy()
    found: list[tuple[int, str, int, float]] = []
    order = np.lexsort((calls["correlation"].to_numpy(), calls["tid"].to_numpy()))
    order = order[calls["correlation"].to_numpy()[order] > 0]
    back = call_ns[order[:-1]] - call_ns[order[1:]]
    same = calls["tid"].to_numpy()[order[:-1]] == calls["tid"].to_numpy()[order[1:]]
    for i in np.flatnonzero(same & (back > NOTICE_NS)).tolist():
        found.append((int(call_place[order[i + 1]]), "host goes back", int(call_ns[order[i + 1]]), back[i] / 1000))

    start, place, call = (device[c].to_numpy() for c in ("ts_ns", "place", "call"))
    known = call >= 0
    early = np.zeros(len(device), dtype=np.int64)
    early[known] = call_ns[call[known]] - start[known]
    hit = np.flatnonzero(early > NOTICE_NS)
    for run in np.split(hit, np.flatnonzero(np.diff(place[hit])) + 1) if len(hit) else ():
        found.append((int(place[run[0]]), "before its launch", int(start[run[0]]), early[run].max() / 1000))

    if len(device) > 1:
        free = np.concatenate((start[:1], np.maximum.accumulate(device["end_ns"].to_numpy())[:-1]))
        arrived = np.where(known, calls["end_ns"].to_numpy()[call] if len(calls) else 0, start)
        still = start - np.maximum(free, arrived)
        for i in np.flatnonzero(still >= PAUSE_NS).tolist():
            found.append((int(place[i]), "stands still", int(start[i]), still[i] / 1000))
    table = pd.DataFrame(sorted(found, key=lambda r: r[2]), columns=["place", *COLUMNS[1:]])
    table = table.astype({"place": np.int64, "kind": object, "ts_ns": np.int64, "us": float})
    table["step"] = steps.label(table.pop("place").to_numpy()).astype(np.int64)
    return table[list(COLUMNS)]
