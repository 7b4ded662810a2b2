"""One rank's trace as host calls and device events that wait for each other: what is taken from it, and the replay."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pandas as pd

from dspark_lab.analysis.breakdown import QUEUED_NS, DeviceLine
from dspark_lab.analysis.edits import Edit
from dspark_lab.analysis.syncs import WAITED_NS, event_age, records
from dspark_lab.trace.launches import NONE, first_at, last_at, named

_PLAIN, _DRAIN, _EVENT, _OWN = 0, 1, 2, 3
_RETURN_NS, _CALL_NS, _START_NS = 5_000, 5_000, 5_000


class RankReplay:
    """One rank's calls and events, with what the replay needs of each."""

    def __init__(self, line: DeviceLine, matched: pd.DataFrame | None, offset: int) -> None:
        self.line, self.offset = line, offset
        self.notes: list[str] = []
        self.remarks: list[str] = []
        trace = line.trace
        calls = trace.linked.calls
        self.waits = trace.waits()
        start, end = calls["ts_ns"].to_numpy(), calls["end_ns"].to_numpy()
        tid = calls["tid"].to_numpy()
        has_events = np.zeros(len(calls), dtype=bool)
        has_events[line.call[line.call >= 0]] = True
        wait_at = {
            (int(t), int(s)): i for i, (t, s) in enumerate(zip(self.waits["tid"], self.waits["ts_ns"], strict=True))
        }
        wait_of = np.array([wait_at.get((int(t), int(s)), -1) for t, s in zip(tid, start, strict=True)], dtype=np.int64)
        matters = has_events | (wait_of >= 0)
        threads = np.unique(tid[has_events])
        outer = _outer(start, end, tid)
        keep = np.flatnonzero(np.isin(tid, threads) & (outer | matters))
        if len(threads) > 1:
            self.notes.append(
                "several threads launch: their order is kept as recorded, what they wait for in each other is not known"
            )
        if len(np.unique(line.stream)) > 1:
            self.notes.append(
                "several streams without event records: an event is taken to wait for the latest that had ended before it, so a gain may be larger"
            )
        orphans = np.flatnonzero(line.call < 0)
        if len(orphans) and orphans[-1] >= len(
            orphans
        ):  # those launched before the capture come first and stay where they were
            self.notes.append(f"{len(orphans)} device events have no launch call: they follow the device alone")
        if trace.integrity.num_launches_without_device_events:
            self.notes.append("launch calls without device events: their time on the device is missing")
        if trace.integrity.num_incomplete_replays:
            self.notes.append("incomplete graph replays: some of their kernels are missing")
        order = keep[np.argsort(start[keep], kind="stable")]
        self.c_start, self.c_dur = start[order], (end - start)[order]
        running = np.concatenate((self.c_start[:1], np.maximum.accumulate(end[order])[:-1]))
        self.c_gap = self.c_start - running
        self.c_wait = wait_of[order]
        self.c_has = has_events[order]
        self._events(order)
        self._wait_targets()
        self.c_cost, self.c_return = self._wait_costs()
        self.group = self._groups(matched)
        self.waited = np.zeros(len(self.waits), dtype=np.int64)
        self.began = line.start.copy()
        self.ended = line.end.copy()

    # -- what is taken from the trace ------------------------------------------------------------------------------

    def _events(self, order: np.ndarray) -> None:
        """Events by launch call, what each follows, and its release: how far into (and after) its call it may start on an idle device."""
        line, n = self.line, len(self.line)
        at = {int(c): k for k, c in enumerate(order)}
        self.e_call = np.array([at.get(int(c), -1) for c in line.call], dtype=np.int64)
        by_call = np.argsort(self.e_call, kind="stable")
        bounds = np.searchsorted(self.e_call[by_call], np.arange(len(order) + 1))
        self.e_order, self.e_bounds = by_call, bounds
        self.several = len(np.unique(line.stream)) > 1
        if self.several:
            ends = np.argsort(line.end, kind="stable")
            rank = np.searchsorted(line.end[ends], line.start, side="right") - 1
            follows = np.where(rank >= 0, ends[np.maximum(rank, 0)], -1)
            follows = np.where((follows >= 0) & (line.call_start[follows] > line.call_start), -1, follows)
            self.e_after = np.where(follows == np.arange(n), -1, follows)
            gap = np.where(self.e_after >= 0, line.start - line.end[np.maximum(self.e_after, 0)], 0)
        else:
            self.e_after = np.arange(n) - 1
            gap = np.where(self.e_after >= 0, line.start - line.end[np.maximum(self.e_after, 0)], 0)
        late = line.host_bound | ((line.call >= 0) & ~line.queued & (line.host_ns > 0) & ~line.same_launch)
        self.e_gap = np.where(late, np.minimum(gap, line.natural), gap)
        call_dur = np.maximum(line.call_end - line.call_start, 1)
        inside = np.clip((line.start - line.call_start) / call_dur, 0.0, 1.0)
        beyond = np.maximum(line.start - line.call_end, 0)
        first = line.call[:n] != np.concatenate(([-2], line.call[:-1])) if n else np.zeros(0, dtype=bool)
        node = (
            np.arange(n) - np.maximum.accumulate(np.where(first, np.arange(n), 0)) if n else np.zeros(0, dtype=np.int64)
        )
        size = np.bincount(line.call[line.call >= 0], minlength=1)[np.maximum(line.call, 0)] if n else node
        table = pd.DataFrame({"size": np.where(line.in_graph, size, 1), "node": node, "name": line.name, "graph": line.in_graph, "shape": line.category, "inside": inside, "beyond": beyond})  # fmt: skip
        seen = table[late]
        share, extra = np.full(n, np.nan), np.full(n, np.nan)
        for keys in (["size", "node", "name"], ["graph", "shape"]):
            if not len(seen):
                break
            pooled = seen.groupby(keys, sort=False)[["inside", "beyond"]].median().reset_index()
            found = table[keys].merge(pooled, on=keys, how="left")
            fill = np.isnan(share) & ((node == 0) | (len(keys) == 3))
            share = np.where(fill, found["inside"].to_numpy(), share)
            extra = np.where(fill, found["beyond"].to_numpy(), extra)
        share = np.where(np.isnan(share), np.where(node == 0, 1.0, 0.0), share)
        extra = np.where(np.isnan(extra), np.where(node == 0, _START_NS, 0), extra)
        # an event that did not wait for the host was released by its start at the latest: what is usual must not delay it in the replay
        self.e_share = np.where(late, share, np.minimum(share, inside))
        self.e_extra = np.where(late, extra, np.minimum(extra, beyond)).astype(np.int64)

    def _wait_targets(self) -> None:
        """What each wait waits for: everything enqueued before it, the work before one event record, or the copy of its own call."""
        line = self.line
        n = len(self.c_start)
        self.c_kind, self.c_target = np.zeros(n, dtype=np.int64), np.full(n, -1)
        kinds = self.waits["kind"].to_numpy()
        rec_at, _ = records(line)
        rec_call = np.searchsorted(self.c_start, rec_at, side="right") - 1
        windows = self.line.trace.step_windows
        rec_place = windows.of(rec_at)
        age, how = event_age(line)
        if how == "at least":
            self.remarks.append(
                "the age of the awaited events does not show in this trace; the least possible is taken"
            )
        upto = (
            np.maximum.accumulate(np.where(self.e_bounds[1:] > self.e_bounds[:-1], self.e_bounds[1:], 0))
            if n
            else np.zeros(0, dtype=np.int64)
        )
        place = windows.of(self.c_start)
        for k in np.flatnonzero(self.c_wait >= 0).tolist():
            kind = kinds[self.c_wait[k]]
            if kind == "sync":
                self.c_kind[k] = _DRAIN
            elif kind == "blocking_copy":
                self.c_kind[k] = _OWN
            elif np.isfinite(age) and place[k] >= 0:
                wanted = np.flatnonzero((rec_place >= 0) & (rec_place <= place[k] - age) & (rec_call < k))
                if len(wanted) and rec_place[wanted[-1]] == place[k] - age:
                    self.c_kind[k], self.c_target[k] = _EVENT, upto[rec_call[wanted[-1]]]
                else:
                    self.c_kind[k] = _PLAIN
        self._upto = upto

    def _wait_costs(self) -> tuple[np.ndarray, np.ndarray]:
        """(cost of the call itself, time from the end of the awaited work to its return), ns, medians of the same call."""
        n = len(self.c_start)
        cost, back = self.c_dur.copy(), np.full(n, _RETURN_NS)
        names = self.waits["name"].astype(str).to_numpy()
        is_wait = np.flatnonzero(self.c_kind != _PLAIN).tolist()
        ends = np.full(n, -1)
        for k in is_wait:
            upto = self._target_bound(k)
            ends[k] = (
                int(self.line.end[self.e_order[:upto]].max())
                if upto > 0 and self.c_kind[k] == _OWN
                else self._end_of(upto)
            )
        for key in {(names[self.c_wait[k]], self.c_kind[k]) for k in is_wait}:
            mine = np.array([k for k in is_wait if (names[self.c_wait[k]], self.c_kind[k]) == key])
            dur, until = self.c_dur[mine], self.c_start[mine] + self.c_dur[mine]
            free = dur[(ends[mine] <= self.c_start[mine]) & (dur < WAITED_NS)]
            usual = int(np.median(free)) if len(free) else min(_CALL_NS, int(dur.min()))
            late = (until - ends[mine])[(ends[mine] > self.c_start[mine]) & (until >= ends[mine])]
            cost[mine], back[mine] = usual, int(np.median(late)) if len(late) else _RETURN_NS
        return cost, back

    def _target_bound(self, k: int) -> int:
        """How many events, in order of launch, a wait covers."""
        if self.c_kind[k] == _EVENT:
            return int(self.c_target[k])
        return int(self._upto[k]) if self.c_kind[k] == _OWN else int(self._upto[k - 1]) if k else 0

    def _end_of(self, upto: int) -> int:
        if not hasattr(self, "_latest"):
            self._latest = np.maximum.accumulate(self.line.end[self.e_order]) if len(self.line) else self.line.end
        return int(self._latest[upto - 1]) if upto > 0 else -1

    def _groups(self, matched: pd.DataFrame | None) -> dict[int, int]:
        """Event → least duration over ranks, for events that are part of a matched collective."""
        if matched is None or not len(matched):
            return {}
        least = (matched.groupby(["step", "ordinal"])["dur_us"].transform("min") * 1000).round().astype(np.int64)
        position = np.empty(len(self.line), dtype=np.int64)
        position[self.line.rows] = np.arange(len(self.line))
        mine = (matched["rank"] == self.line.trace.rank).to_numpy()
        return dict(
            zip(position[matched["row"].to_numpy()[mine]].tolist(), least.to_numpy()[mine].tolist(), strict=True)
        )

    # -- the replay ------------------------------------------------------------------------------------------------

    def replay(self, edit: Edit) -> Generator[int, int, None]:
        """Run; yields its (aligned) start at each matched collective and is sent the start of the last rank."""
        line = self.line
        dur = self._durations(edit)
        gone = dur < 0
        dur = np.maximum(dur, 0).tolist()
        dropped = self._dropped(edit)
        skip = self._empty_calls(gone)
        c_gap, c_cost, c_dur = self.c_gap.tolist(), self.c_cost.tolist(), self.c_dur.tolist()
        c_kind, c_return, c_wait = self.c_kind.tolist(), self.c_return.tolist(), self.c_wait.tolist()
        share, extra, e_gap, after = (
            self.e_share.tolist(),
            self.e_extra.tolist(),
            self.e_gap.tolist(),
            self.e_after.tolist(),
        )
        order, bounds = self.e_order.tolist(), self.e_bounds.tolist()
        goner, has_call = gone.tolist(), (self.e_call >= 0).tolist()
        began, ended = [0] * len(line), [0] * len(line)
        latest = [0] * (len(line) + 1)  # end of all among the first k events in order of launch
        group, offset = self.group, self.offset
        waited = np.zeros(len(self.waits), dtype=np.int64)
        now = int(self.c_start[0]) if len(self.c_start) else 0
        # what the first events queued behind lies before the capture: the device was not free earlier than they show
        unseen = (line.call >= 0) & (line.start > line.call_end + QUEUED_NS)
        floor = np.where(unseen, line.start, np.iinfo(np.int64).min // 2).tolist()
        done = 0
        scale, cost = edit.scale_host, edit.launch_cost
        # events without a call go first in launch order: they keep their recorded time
        for j in range(bounds[0] if bounds else len(order)):
            i = order[j]
            began[i], ended[i] = int(line.start[i]), int(line.start[i]) + dur[i]
            latest[j + 1] = max(latest[j], ended[i])
            done = j + 1
        for k in range(len(c_gap)):
            now += int(c_gap[k] * scale) if c_gap[k] > 0 else c_gap[k]
            start, kind = now, c_kind[k]
            if kind == _PLAIN or skip[k]:
                took = 0 if skip[k] else int(c_dur[k] * cost)
            elif kind == _OWN:
                took = int(c_cost[k] * cost)
            else:
                took = int(c_cost[k] * cost)
                if not dropped[k]:
                    upto = min(self._target_bound(k), done)
                    took = max(took, latest[upto] + c_return[k] - start)
                else:
                    took = 0
            for j in range(bounds[k], bounds[k + 1]):
                i = order[j]
                prior = after[i]
                ready = (ended[prior] + e_gap[i]) if prior >= 0 else floor[i]
                if goner[i]:
                    began[i] = ended[i] = ended[prior] if prior >= 0 else start
                    latest[j + 1] = latest[j]
                    continue
                if has_call[i]:
                    ready = max(ready, start + int(share[i] * took) + extra[i])
                began[i] = ready
                if i in group:
                    last = yield ready - offset
                    ended[i] = max(last + offset + group[i], ready)
                else:
                    ended[i] = ready + dur[i]
                latest[j + 1] = max(latest[j], ended[i])
            done = max(done, bounds[k + 1])
            if kind == _OWN and not dropped[k] and not skip[k]:
                took = max(took, latest[done] + c_return[k] - start)
            if c_wait[k] >= 0:
                waited[c_wait[k]] = took
            now = start + took
        self.waited = waited
        self.began, self.ended = np.array(began, dtype=np.int64), np.array(ended, dtype=np.int64)
        self.gone = gone

    def periods(self) -> np.ndarray:
        """Periods of the last replay, µs, as the trace's own are defined."""
        n = len(self.line.trace.step_windows)
        inside = (self.line.place >= 0) & ~self.gone
        place = self.line.place[inside]
        first, last = first_at(place, self.began[inside], n), last_at(place, self.ended[inside], n)
        following = np.append(first[1:], NONE)
        until = np.where(self.line.trace.step_windows.follows(), following, last)
        known = (first != NONE) & (until != NONE)
        return np.where(known, (np.where(known, until, 0) - np.where(known, first, 0)) / 1000, np.nan)

    def _durations(self, edit: Edit) -> np.ndarray:
        line = self.line
        dur = line.end - line.start
        kernel = line.category == "kernel"
        names = (
            pd.Series(pd.Categorical.from_codes(line.name, categories=line.names))
            if len(line)
            else pd.Series(dtype="category")
        )
        rows = pd.DataFrame({"name": names})
        for pattern, factor in edit.scale_kernel.items():
            dur = np.where(kernel & named(rows, pattern), (dur * factor).astype(np.int64), dur)
        if edit.drop_kernel is not None:
            dur = np.where(kernel & named(rows, edit.drop_kernel), -1, dur)
        if edit.drop_copy is not None:
            dur = np.where(~kernel & named(rows, edit.drop_copy), -1, dur)
        return dur

    def _dropped(self, edit: Edit) -> list[bool]:
        kinds, sites, steps = (self.waits[c].to_numpy() for c in ("kind", "site", "step"))
        if edit.drop_site is not None:
            hit = sites == edit.drop_site
        else:
            hit = np.isin(kinds.astype(str), edit.drop)
        hit = hit & (steps >= 0)
        return [bool(w >= 0 and hit[w]) for w in self.c_wait]

    def _empty_calls(self, gone: np.ndarray) -> list[bool]:
        """Calls that launched only what was removed."""
        if not gone.any():
            return [False] * len(self.c_start)
        left = np.bincount(self.e_call[(self.e_call >= 0) & ~gone], minlength=len(self.c_start))
        return (self.c_has & (left == 0)).tolist()


def _outer(start: np.ndarray, end: np.ndarray, tid: np.ndarray) -> np.ndarray:
    """Which calls lie in no other of their thread."""
    out = np.zeros(len(start), dtype=bool)
    for t in np.unique(tid):
        mine = np.flatnonzero(tid == t)
        mine = mine[np.lexsort((-end[mine], start[mine]))]
        reach = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end[mine])[:-1]))
        out[mine] = end[mine] > reach
    return out
