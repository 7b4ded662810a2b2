"""Where a step goes: compute, communication, copies, idle, and what the device was idle for. Parts sum to the period to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import comm_labels, match_collectives
from dspark_lab.trace import Trace, TraceSet, open_trace

COMPUTE, COMMUNICATION, COPY = 0, 1, 2
PARTS = ("compute", "communication", "peer_wait", "copy", "idle_host", "idle_graph", "idle_other")
COLUMNS = ("rank", "step", "period_ns", *(f"{p}_ns" for p in PARTS), "communication_total_ns", "withheld", "profiled")
#: A call that ended this long before the device was free was in the queue: what followed started as soon as the device could.
QUEUED_NS = 20_000
#: Less than this beyond the usual gap is no waiting.
NOTICE_NS = 1_000


@dataclass(frozen=True)
class Slice:
    """One step on the device: its window, its events' own time, the gaps before events. Indices are into the line's arrays."""

    place: int
    begin_ns: int
    end_ns: int
    events: np.ndarray
    own_ns: np.ndarray
    gaps: np.ndarray
    gap_ns: np.ndarray


class DeviceLine:
    """A rank's device events in order of start, with the calls that launched them, in integer nanoseconds.

    Attributes: start, end, call_start, call_end (−1 unknown), place, kind (compute, communication, copy), same_launch (by the same
    call as the event before), prev_end (latest end of any earlier event), gap (start − prev_end), natural (the gap usual between two
    such events when the launch was queued well ahead), queued (the launch was there in time), host_bound (the device had to wait
    for the host), host_ns, graph_ns, other_ns (the gap before the event, split).
    """

    def __init__(
        self,
        trace: Trace,
        *,
        peer_wait_ns: np.ndarray | None = None,
        comm_patterns: Mapping[str, str] | None = None,
    ) -> None:
        self.trace = trace
        device, calls = trace.linked.device, trace.linked.calls
        order = np.argsort(device["ts_ns"].to_numpy(), kind="stable")
        self.rows = order
        n = len(order)
        self.start = device["ts_ns"].to_numpy()[order]
        self.end = np.maximum(trace.sound_ends_ns[order], self.start)
        self.name = device["name"].cat.codes.to_numpy().astype(np.int64)[order]
        self.names = device["name"].cat.categories
        self.place = device["place"].to_numpy()[order]
        self.stream = device["stream"].to_numpy()[order]
        self.bytes = device["bytes"].to_numpy()[order]
        self.category = device["category"].astype(str).to_numpy(dtype=object)[order]
        label = comm_labels(device["name"], comm_patterns)[order]
        kernel = self.category == "kernel"
        self.kind = np.where(~kernel, COPY, np.where(label != "", COMMUNICATION, COMPUTE))
        wait = np.zeros(n, dtype=np.int64) if peer_wait_ns is None else peer_wait_ns[order]
        self.peer_wait = np.minimum(wait, self.end - self.start)
        self.call = device["call"].to_numpy()[order]
        known = self.call >= 0
        none = len(calls) == 0
        at = np.where(known, self.call, 0)
        self.call_start = np.full(n, -1) if none else np.where(known, calls["ts_ns"].to_numpy()[at], -1)
        self.call_end = np.full(n, -1) if none else np.where(known, calls["end_ns"].to_numpy()[at], -1)
        self.in_graph = np.zeros(n, dtype=bool) if none else known & calls["is_graph"].to_numpy()[at]
        self.same_launch = np.zeros(n, dtype=bool)
        self.same_launch[1:] = known[1:] & (self.call[1:] == self.call[:-1])
        latest = np.maximum.accumulate(self.end) if n else self.end
        self.prev_end = np.concatenate((self.start[:1], latest[:-1]))
        self.gap = self.start - self.prev_end
        self.queued = ~known | (self.call_end + QUEUED_NS <= self.prev_end)
        self.natural = self._natural()
        late = known & ~self.queued & (self.gap > self.natural + np.maximum(NOTICE_NS, np.abs(self.natural) // 2))
        self.host_bound = late
        if n:
            self.host_bound[0] = False
        self._split_gaps()

    def __len__(self) -> int:
        return len(self.start)

    def _natural(self) -> np.ndarray:
        """Usual gap before each event: the median over queued events with the same neighbours, else of the same kinds, else of all."""
        n = len(self.start)
        if not n:
            return np.zeros(0, dtype=np.int64)
        before = np.concatenate(([-1], self.name[:-1]))
        shape = self.category != "kernel"
        table = pd.DataFrame(
            {
                "a": before,
                "b": self.name,
                "same": self.same_launch,
                "ka": np.concatenate(([False], shape[:-1])),
                "kb": shape,
                "graph": self.in_graph,
                "gap": self.gap,
            }
        )
        ahead = self.queued & (self.gap < 1_000_000)
        # Events without a launch call look like launches of their own, and are nodes of a graph cut off by the capture's start.
        sample = table[ahead & (self.call >= 0)] if (ahead & (self.call >= 0)).any() else table[ahead]
        if not len(sample):  # nothing was ever queued ahead: the least gaps are the nearest to it
            sample = table[self.gap <= np.percentile(self.gap, 10)]
        out = np.full(n, np.nan)
        for keys in (["a", "b", "same"], ["same", "ka", "kb", "graph"], ["same"]):
            if not np.isnan(out).any():
                break
            usual = sample.groupby(keys, sort=False)["gap"].median().rename("usual").reset_index()
            found = table[keys].merge(usual, on=keys, how="left")["usual"].to_numpy()
            out = np.where(np.isnan(out), found, out)
        return np.where(np.isnan(out), float(sample["gap"].median()), out).astype(np.int64)

    def _split_gaps(self) -> None:
        gap = np.maximum(self.gap, 0)
        node = self.same_launch
        starved = np.where(self.host_bound, np.maximum(gap - np.maximum(self.natural, 0), 0), 0)
        arrived = np.clip(np.minimum(self.call_end, self.start) - self.prev_end, 0, gap)
        host = np.where(node, starved, np.where(self.call >= 0, arrived, 0))
        if len(host):
            host[0] = 0
        self.host_ns = host.astype(np.int64)
        self.graph_ns = np.where(node, gap - host, 0).astype(np.int64)
        self.other_ns = (gap - self.host_ns - self.graph_ns).astype(np.int64)

    @cached_property
    def slices(self) -> dict[int, Slice]:
        """The steps that have a period, by position."""
        steps, windows = self.trace.steps(), self.trace.step_windows
        follows = windows.follows()
        first = steps["device_start_ns"].to_numpy()
        out: dict[int, Slice] = {}
        latest = np.maximum.accumulate(self.end) if len(self) else self.end
        for k in range(len(steps)):
            if first[k] < 0:
                continue
            if follows[k]:
                if first[k + 1] < 0:
                    continue
                until = int(first[k + 1])
            else:
                until = int(self.end[self.place == k].max())
            if until <= first[k]:
                continue
            out[k] = self._slice(k, int(first[k]), until, latest)
        return out

    def _slice(self, place: int, begin: int, end: int, latest: np.ndarray) -> Slice:
        low = int(np.searchsorted(latest, begin, side="right"))
        high = int(np.searchsorted(self.start, end, side="left"))
        at = np.arange(low, high)
        s, e = np.clip(self.start[at], begin, end), np.clip(self.end[at], begin, end)
        own = np.zeros(len(at), dtype=np.int64)
        covered: list[tuple[np.ndarray, np.ndarray]] = []
        for kind in (COMPUTE, COMMUNICATION, COPY):
            mine = np.flatnonzero(self.kind[at] == kind)
            if not len(mine):
                continue
            run = np.concatenate(([begin], np.maximum.accumulate(e[mine])[:-1]))
            a, b = np.maximum(s[mine], run), e[mine]
            length = np.maximum(b - a, 0)
            if covered:
                upper = _union(covered)
                length = length - np.where(length > 0, _covered(upper, a, b), 0)
            own[mine] = length
            covered.append((s[mine], e[mine]))
        gaps = np.arange(low, min(high + 1, len(self)))
        running = (
            np.concatenate(([begin], np.maximum(np.maximum.accumulate(e), begin))) if len(at) else np.array([begin])
        )
        gap = np.maximum(np.minimum(self.start[gaps], end) - running[: len(gaps)], 0)
        rest = (end - begin) - int(own.sum()) - int(gap.sum())
        if rest:  # the window ends in idle time without a next event
            gaps, gap = np.append(gaps, -1), np.append(gap, rest)
        return Slice(place=place, begin_ns=begin, end_ns=end, events=at, own_ns=own, gaps=gaps, gap_ns=gap)

    def gap_parts(self, one: Slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(waiting for the host, between graph nodes, other) of each gap of a step, ns; a gap cut by the window counts its front."""
        at, known = np.maximum(one.gaps, 0), one.gaps >= 0
        host = (
            np.where(known, np.minimum(self.host_ns[at], one.gap_ns), 0)
            if len(self)
            else np.zeros(len(at), dtype=np.int64)
        )
        graph = np.where(known, np.minimum(self.graph_ns[at], one.gap_ns - host), 0) if len(self) else host
        return host, graph, one.gap_ns - host - graph


def _union(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merged intervals (start, end) and the length of all before each."""
    start, end = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    fresh = np.concatenate(([True], start[1:] > end[:-1]))
    starts = start[fresh]
    ends = end[np.append(np.flatnonzero(fresh)[1:] - 1, len(end) - 1)]
    before = np.concatenate(([0], np.cumsum(ends - starts)[:-1]))
    return starts, ends, before


def _covered(union: tuple[np.ndarray, np.ndarray, np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How much of each [a, b) the union covers."""
    starts, ends, before = union

    def until(t: np.ndarray) -> np.ndarray:
        i = np.searchsorted(starts, t, side="right") - 1
        j = np.maximum(i, 0)
        return np.where(i >= 0, before[j] + np.minimum(t, ends[j]) - starts[j], 0)

    return until(b) - until(a)


def lines(source: Trace | TraceSet, comm_patterns: Mapping[str, str] | None = None) -> dict[int, DeviceLine]:
    """The device line of each rank; waiting for a peer is known where several ranks are there."""
    traces = dict(source) if isinstance(source, TraceSet) else {source.rank: source}
    matched = match_collectives(traces, comm_patterns) if len(traces) > 1 else None
    out = {}
    for rank, trace in traces.items():
        wait = None
        if matched is not None:
            wait = np.zeros(len(trace.linked.device), dtype=np.int64)
            own = matched[(matched["rank"] == rank).to_numpy()]
            wait[own["row"].to_numpy()] = (own["peer_wait_us"].to_numpy() * 1000).round().astype(np.int64)
        out[rank] = DeviceLine(trace, peer_wait_ns=wait, comm_patterns=comm_patterns)
    return out


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
        begins, ends, _ = _union([(np.clip(s, one.begin_ns, one.end_ns), np.clip(e, one.begin_ns, one.end_ns))])
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
