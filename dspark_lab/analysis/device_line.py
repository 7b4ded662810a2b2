"""A rank's device as one line of events in time: what ran when, what was idle before it, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import comm_labels, match_collectives
from dspark_lab.analysis.spans import covered, union
from dspark_lab.trace import Trace, TraceSet

COMPUTE, COMMUNICATION, COPY = 0, 1, 2
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
        usual = np.maximum(self.natural, 0)
        late = known & ~self.queued & (self.gap > usual + np.maximum(NOTICE_NS, usual // 2))
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
        before: list[tuple[np.ndarray, np.ndarray]] = []
        for kind in (COMPUTE, COMMUNICATION, COPY):
            mine = np.flatnonzero(self.kind[at] == kind)
            if not len(mine):
                continue
            run = np.concatenate(([begin], np.maximum.accumulate(e[mine])[:-1]))
            a, b = np.maximum(s[mine], run), e[mine]
            length = np.maximum(b - a, 0)
            if before:
                upper = union(before)
                length = length - np.where(length > 0, covered(upper, a, b), 0)
            own[mine] = length
            before.append((s[mine], e[mine]))
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
