"""One rank's trace replayed: host calls and device events that wait for each other, with something left out."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pandas as pd

from dspark_lab.analysis.device_line import QUEUED_NS, DeviceLine
from dspark_lab.analysis.edits import Edit
from dspark_lab.analysis.host_line import OWN, PLAIN, HostLine
from dspark_lab.analysis.releases import Releases
from dspark_lab.trace.events import named
from dspark_lab.trace.launches import NONE, first_at, last_at


class RankReplay:
    """One rank's calls and events, run in order. After a run: began, ended, gone (by event), waited (by wait), ns."""

    def __init__(self, line: DeviceLine, matched: pd.DataFrame | None, offset: int) -> None:
        self.line, self.offset = line, offset
        self.host, self.releases = HostLine(line), Releases(line)
        self.notes, self.remarks, self.waits = self.host.notes, self.host.remarks, self.host.waits
        self.group = self._groups(matched)
        self.waited = np.zeros(len(self.waits), dtype=np.int64)
        self.began, self.ended = line.start.copy(), line.end.copy()
        self.gone = np.zeros(len(line), dtype=bool)

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

    def replay(self, edit: Edit) -> Generator[int, int, None]:
        """Run; yields its (aligned) start at each matched collective and is sent the start of the last rank."""
        line, host = self.line, self.host
        dur = self._durations(edit)
        gone = dur < 0
        dur, goner = np.maximum(dur, 0).tolist(), gone.tolist()
        dropped, skip = self._dropped(edit), self._empty_calls(gone)
        c_gap, c_dur, c_kind, c_wait = host.gap.tolist(), host.dur.tolist(), host.kind.tolist(), host.wait.tolist()
        order, bounds, has_call = host.events.tolist(), host.bounds.tolist(), (host.call >= 0).tolist()
        rules = self.releases
        after, e_gap = rules.after.tolist(), rules.gap_ns.tolist()
        share, extra = rules.share.tolist(), rules.extra_ns.tolist()
        floor = self._floor()
        began, ended = [0] * len(line), [0] * len(line)
        latest = [0] * (len(line) + 1)  # end of all among the first k events in order of launch
        group, offset = self.group, self.offset
        waited = np.zeros(len(self.waits), dtype=np.int64)
        now = int(host.start[0]) if len(host) else 0
        # events without a call go first in launch order: they keep their recorded time
        for j in range(bounds[0] if bounds else len(order)):
            i = order[j]
            began[i], ended[i] = int(line.start[i]), int(line.start[i]) + dur[i]
            latest[j + 1] = max(latest[j], ended[i])
        done = bounds[0] if bounds else len(order)
        for k in range(len(c_gap)):
            now += int(c_gap[k] * edit.scale_host) if c_gap[k] > 0 else c_gap[k]
            start, kind = now, c_kind[k]
            if skip[k] or (dropped[k] and kind not in (PLAIN, OWN)):
                took = 0
            elif kind == PLAIN:
                took = int(c_dur[k] * edit.launch_cost)
            elif kind == OWN:
                took = int(host.cost[k] * edit.launch_cost)
            else:
                took = host.took(k, start, latest[min(host.covers(k), done)], edit.launch_cost)
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
            if kind == OWN and not dropped[k] and not skip[k]:
                took = host.took(k, start, latest[done], edit.launch_cost)
            if c_wait[k] >= 0:
                waited[c_wait[k]] = took
            now = start + took
        self.waited, self.gone = waited, gone
        self.began, self.ended = np.array(began, dtype=np.int64), np.array(ended, dtype=np.int64)

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

    def starts_us(self) -> np.ndarray:
        """When each step began on the device in the last replay, on the job's clock, and when the last of them ended: µs, NaN unknown."""
        n = len(self.line.trace.step_windows)
        inside = (self.line.place >= 0) & ~self.gone
        place = self.line.place[inside]
        first, last = first_at(place, self.began[inside], n), last_at(place, self.ended[inside], n)
        times = np.append(first, last[-1:])
        return np.where(times == NONE, np.nan, (times - self.offset) / 1000)

    def dry_us(self) -> float:
        """How long the device stood dry for the host in the last replay, µs a step."""
        rules, inside = self.releases, (self.releases.after >= 0) & (self.line.place >= 0) & ~self.gone
        gap = self.began[inside] - self.ended[rules.after[inside]] - rules.gap_ns[inside]
        return float(np.maximum(gap, 0).sum()) / 1000 / max(len(self.line.trace.step_windows), 1)

    def _floor(self) -> list[int]:
        """What the first events queued behind lies before the capture: the device was not free earlier than they show."""
        line = self.line
        unseen = (line.call >= 0) & (line.start > line.call_end + QUEUED_NS)
        return np.where(unseen, line.start, np.iinfo(np.int64).min // 2).tolist()

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
        return [bool(w >= 0 and hit[w]) for w in self.host.wait]

    def _empty_calls(self, gone: np.ndarray) -> list[bool]:
        """Calls that launched only what was removed."""
        if not gone.any():
            return [False] * len(self.host)
        left = np.bincount(self.host.call[(self.host.call >= 0) & ~gone], minlength=len(self.host))
        return (self.host.has_events & (left == 0)).tolist()
