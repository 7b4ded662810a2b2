"""One rank's host calls as a replay takes them: in their order, the host's time between them, and what each wait waits for."""

from __future__ import annotations

import numpy as np

from dspark_lab.analysis.device_line import DeviceLine
from dspark_lab.analysis.syncs import WAITED_NS, event_age, records
from dspark_lab.trace.polls import looks_of

PLAIN, DRAIN, EVENT, OWN = 0, 1, 2, 3
_RETURN_NS, _CALL_NS = 5_000, 5_000


class HostLine:
    """The calls that launch or wait, and the outermost others of the threads that launch.

    Attributes, by call: start, dur, gap (since all calls before had ended), has_events, wait (row of ``trace.waits()``, −1), kind (plain; drain: waits
    for all enqueued before; event: for what was enqueued before a record; own: for its own copy), target (how many events an event wait covers), cost
    (of the call itself), back (from the end of the awaited work to the return). By event: call (−1 unknown). ``events[bounds[k]:bounds[k + 1]]`` are those of call k.
    notes: why a replay is not exact; remarks: what is assumed.
    """

    def __init__(self, line: DeviceLine) -> None:
        self.line = line
        self.notes: list[str] = []
        self.remarks: list[str] = []
        trace = line.trace
        self.waits = trace.waits()
        calls, polls = trace.linked.calls, trace.linked.polls
        start, end, tid = calls["ts_ns"].to_numpy(), calls["end_ns"].to_numpy().copy(), calls["tid"].to_numpy()
        end[polls.first] = end[polls.last]  # the looks of one wait are one call
        has_events = np.zeros(len(calls), dtype=bool)
        has_events[line.call[line.call >= 0]] = True
        at = {(int(t), int(s)): i for i, (t, s) in enumerate(zip(self.waits["tid"], self.waits["ts_ns"], strict=True))}
        wait_of = np.array([at.get((int(t), int(s)), -1) for t, s in zip(tid, start, strict=True)], dtype=np.int64)
        threads = np.unique(tid[has_events])
        keep = np.flatnonzero(np.isin(tid, threads) & (_outer(start, end, tid) | has_events | (wait_of >= 0)))
        self._doubts(threads)
        order = keep[np.argsort(start[keep], kind="stable")]
        self.start, self.dur = start[order], (end - start)[order]
        self.gap = self.start - np.concatenate((self.start[:1], np.maximum.accumulate(end[order])[:-1]))
        self.wait, self.has_events = wait_of[order], has_events[order]
        place_of = {int(c): k for k, c in enumerate(order)}
        self.call = np.array([place_of.get(int(c), -1) for c in line.call], dtype=np.int64)
        self.events = np.argsort(self.call, kind="stable")
        self.bounds = np.searchsorted(self.call[self.events], np.arange(len(order) + 1))
        grows = np.where(self.bounds[1:] > self.bounds[:-1], self.bounds[1:], 0)
        self._upto = np.maximum.accumulate(grows) if len(order) else grows
        self._wait_targets()
        self._wait_costs()

    def __len__(self) -> int:
        return len(self.start)

    def covers(self, k: int) -> int:
        """How many events, in order of launch, wait ``k`` covers."""
        if self.kind[k] == EVENT:
            return int(self.target[k])
        return int(self._upto[k]) if self.kind[k] == OWN else int(self._upto[k - 1]) if k else 0

    def took(self, k: int, start: int, done: int, cost: float) -> int:
        """How long wait ``k`` takes that begins at ``start`` for work done at ``done``; ``cost``: a factor on the call's own time."""
        least = int(self.cost[k] * cost)
        looks = self._looks.get(k)
        if looks is None:
            return max(least, done + int(self.back[k]) - start)
        seen, answered = looks
        if done - start <= seen[0]:
            return least
        i = int(np.searchsorted(seen, done - start))
        if i < len(seen):
            return int(answered[i])
        more = -(-(done - start - int(seen[-1])) // self._every)
        return int(answered[-1]) + more * self._every

    # -- what is taken from the trace ------------------------------------------------------------------------------

    def _doubts(self, threads: np.ndarray) -> None:
        line, integrity = self.line, self.line.trace.integrity
        if len(threads) > 1:
            self.notes.append(
                "several threads launch: their order is kept as recorded, what they wait for in each other is not known"
            )
        if len(np.unique(line.stream)) > 1:
            self.notes.append(
                "several streams without event records: an event is taken to wait for the latest that had ended before it, so a gain may be larger"
            )
        orphans = np.flatnonzero(line.call < 0)
        # those launched before the capture come first and stay where they were
        if len(orphans) and orphans[-1] >= len(orphans):
            self.notes.append(f"{len(orphans)} device events have no launch call: they follow the device alone")
        if integrity.num_launches_without_device_events:
            self.notes.append("launch calls without device events: their time on the device is missing")
        if integrity.num_incomplete_replays:
            self.notes.append("incomplete graph replays: some of their kernels are missing")

    def _wait_targets(self) -> None:
        """What each wait waits for: everything enqueued before it, the work before one event record, or the copy of its own call."""
        line, n = self.line, len(self)
        self.kind, self.target = np.zeros(n, dtype=np.int64), np.full(n, -1)
        kinds = self.waits["kind"].to_numpy()
        rec_at, _ = records(line)
        rec_call = np.searchsorted(self.start, rec_at, side="right") - 1
        windows = line.trace.step_windows
        rec_place, place = windows.of(rec_at), windows.of(self.start)
        age, how = event_age(line)
        if how == "at least":
            self.remarks.append(
                "the age of the awaited events does not show in this trace; the least possible is taken"
            )
        for k in np.flatnonzero(self.wait >= 0).tolist():
            kind = kinds[self.wait[k]]
            if kind == "sync":
                self.kind[k] = DRAIN
            elif kind == "blocking_copy":
                self.kind[k] = OWN
            elif np.isfinite(age) and place[k] >= 0:
                wanted = np.flatnonzero((rec_place >= 0) & (rec_place <= place[k] - age) & (rec_call < k))
                if len(wanted) and rec_place[wanted[-1]] == place[k] - age:
                    self.kind[k], self.target[k] = EVENT, self._upto[rec_call[wanted[-1]]]

    def _wait_costs(self) -> None:
        """Cost and return of waits, medians over those of the same call; when a wait by polling looks, as it did."""
        line, n = self.line, len(self)
        self.cost, self.back = self.dur.copy(), np.full(n, _RETURN_NS)
        names = self.waits["name"].astype(str).to_numpy()
        is_wait = np.flatnonzero(self.kind != PLAIN).tolist()
        latest = np.maximum.accumulate(line.end[self.events]) if len(line) else line.end
        ends = np.full(n, -1)
        for k in is_wait:
            upto = self.covers(k)
            ends[k] = int(latest[upto - 1]) if upto > 0 else -1
        for key in {(names[self.wait[k]], self.kind[k]) for k in is_wait}:
            mine = np.array([k for k in is_wait if (names[self.wait[k]], self.kind[k]) == key])
            dur, until = self.dur[mine], self.start[mine] + self.dur[mine]
            free = dur[(ends[mine] <= self.start[mine]) & (dur < WAITED_NS)]
            usual = int(np.median(free)) if len(free) else min(_CALL_NS, int(dur.min()))
            late = (until - ends[mine])[(ends[mine] > self.start[mine]) & (until >= ends[mine])]
            self.cost[mine], self.back[mine] = usual, int(np.median(late)) if len(late) else _RETURN_NS
        calls = line.trace.linked.calls
        looks = looks_of(self.waits, line.trace.linked.polls, line.trace.linked.calls)
        self._looks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        apart: list[np.ndarray] = []
        for k in is_wait:
            rows = looks.get(int(self.wait[k]))
            if rows is None:
                continue
            asked, answered = calls["ts_ns"].to_numpy()[rows], calls["end_ns"].to_numpy()[rows]
            self._looks[k] = (asked + answered) // 2 - self.start[k], answered - self.start[k]
            self.cost[k] = answered[0] - asked[0]
            apart.append(np.diff(answered))
        every = np.concatenate(apart) if apart else np.empty(0)
        self._every = max(int(np.median(every)) if len(every) else _CALL_NS, 1)


def _outer(start: np.ndarray, end: np.ndarray, tid: np.ndarray) -> np.ndarray:
    """Which calls lie in no other of their thread."""
    out = np.zeros(len(start), dtype=bool)
    for t in np.unique(tid):
        mine = np.flatnonzero(tid == t)
        mine = mine[np.lexsort((-end[mine], start[mine]))]
        reach = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end[mine])[:-1]))
        out[mine] = end[mine] > reach
    return out
