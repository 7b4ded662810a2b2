"""Where a step goes: compute, communication, copies, idle, and what the device was idle for. Parts sum to the period to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.device_line import COMMUNICATION, COMPUTE, COPY, DeviceLine, Slice, lines
from dspark_lab.analysis.spans import union
from dspark_lab.trace import Trace, open_trace

PARTS = ("compute", "communication", "peer_wait", "copy", "idle_host", "idle_graph", "idle_other")
COLUMNS = ("rank", "step", "period_ns", *(f"{p}_ns" for p in PARTS), "communication_total_ns", "withheld", "profiled")


def breakdown(source: Any, *, comm_patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Where each step's period goes, in integer nanoseconds; one row a step of a rank.

    Columns: rank, step, period_ns and its parts, which sum to it exactly: compute_ns; communication_ns (not hidden behind compute)
    without peer_wait_ns, its time beyond the quickest rank's (0 with one rank: a kernel that waits looks like one that works);
    copy_ns (copies and memsets not hidden behind kernels); idle_host_ns (the device was free before the next launch had arrived),
    idle_graph_ns (between nodes of one graph), idle_other_ns (launch latency, gaps between queued launches). Beside them
    communication_total_ns (hidden too), withheld (why the parts are −1; "" where they stand) and profiled.

    Args:
        source: a trace or what `open_trace` takes.
        comm_patterns: more names of communication kernels, ``{label: regular expression}``.
    """
    rows = []
    opened = open_trace(source)
    for rank, line in lines(opened, comm_patterns).items():
        reasons = _withheld(line.trace)
        for k, step in enumerate(line.trace.step_windows.labels):
            one = line.slices.get(k)
            why = reasons.get(k, "") or (
                "" if one is not None else "the step has no period on the device, or starts there after the next one"
            )
            values = dict.fromkeys(("period", *PARTS, "communication_total"), -1)
            if one is not None and not why:
                values = _parts(line, one)
            elif one is not None:
                values["period"] = one.end_ns - one.begin_ns
            rows.append(
                {"rank": rank, "step": int(step), "withheld": why, "profiled": line.trace.profiled}
                | {f"{k}_ns": v for k, v in values.items()}
            )
    if not rows:
        return pd.DataFrame(
            {c: pd.Series(dtype=bool if c == "profiled" else object if c == "withheld" else np.int64) for c in COLUMNS}
        )
    return pd.DataFrame(rows)[list(COLUMNS)]


def _parts(line: DeviceLine, one: Slice) -> dict[str, int]:
    kind = line.kind[one.events]
    peer = np.where(kind == COMMUNICATION, np.minimum(line.peer_wait[one.events], one.own_ns), 0)
    host, graph, other = line.gap_parts(one)
    comm = kind == COMMUNICATION
    s, e = line.start[one.events[comm]], line.end[one.events[comm]]
    total = 0
    if comm.any():
        begins, ends, _ = union([(np.clip(s, one.begin_ns, one.end_ns), np.clip(e, one.begin_ns, one.end_ns))])
        total = int((ends - begins).sum())
    return {
        "period": one.end_ns - one.begin_ns,
        "compute": int(one.own_ns[kind == COMPUTE].sum()),
        "communication": int((one.own_ns - peer)[comm].sum()),
        "peer_wait": int(peer.sum()),
        "copy": int(one.own_ns[kind == COPY].sum()),
        "idle_host": int(host.sum()),
        "idle_graph": int(graph.sum()),
        "idle_other": int(other.sum()),
        "communication_total": total,
    }


def _withheld(trace: Trace) -> dict[int, str]:
    """Positions of the steps whose parts would be wrong, with the reason: time without a record is not idle time."""
    out: dict[int, str] = {}
    launched = trace.launches()
    lost = launched[((launched["num_device_events"] == 0) & (launched["step"] >= 0)).to_numpy()]
    place = {int(s): k for k, s in enumerate(trace.step_windows.labels)}
    for step, count in lost.groupby("step").size().items():
        out[place[int(step)]] = f"{count} launch calls have no device event"  # pyright: ignore[reportArgumentType]
    for jump in trace.integrity.clock_jumps:
        touched = (
            place.values() if jump["kind"] == "host goes back" else [place[s] for s in (jump["step"],) if s in place]
        )
        for k in touched:
            out.setdefault(k, f"a clock jumps: {jump['kind']}")
    if trace.integrity.num_incomplete_replays:
        for k in incomplete_steps(trace):
            out.setdefault(k, "a graph replay holds fewer events than others of its graph")
    return out


def incomplete_steps(trace: Trace) -> Iterator[int]:
    """Positions of steps with an incomplete graph replay."""
    from dspark_lab.analysis.replays import replays

    rows = replays(trace).launches
    place = {int(s): k for k, s in enumerate(trace.step_windows.labels)}
    for step in pd.unique(rows.loc[(~rows["is_complete"]).to_numpy(), "step"]):
        if int(step) in place:
            yield place[int(step)]
