"""The replays of all ranks, run together: they meet in their collectives. What an edit changes for waits, and which edits gain most."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import clocks, match_collectives, not_together
from dspark_lab.analysis.device_line import COMMUNICATION, lines
from dspark_lab.analysis.edits import DROPS, Edit
from dspark_lab.analysis.rank_replay import RankReplay
from dspark_lab.errors import LabError, unknown
from dspark_lab.trace import Trace, TraceSet
from dspark_lab.trace.progress import tell
from dspark_lab.trace.summary import SKIPPED_STEPS

_ON_HOST = re.compile(r"(?:gloo|mpi):")
WAIT_COLUMNS = ("kind", "site", "measured_us", "replayed_us", "predicted_us")
EDIT_COLUMNS = ("edit", "target", "predicted_us", "gain_us")


@dataclass
class Outcome:
    """What a run gave: the step as it is measured; pace_us, the job's mean step; dry_us, how long the driest device waited for its host, a step."""

    step_us: float
    pace_us: float
    dry_us: float
    wait_ns: dict[int, np.ndarray]


class JobReplay:
    """The replays of all ranks, run together."""

    def __init__(self, opened: Trace | TraceSet, comm_patterns: Mapping[str, str] | None) -> None:
        self.traces = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
        self.notes: list[str] = []
        self.remarks: list[str] = []
        own = lines(opened, comm_patterns)
        matched, offset = None, dict.fromkeys(self.traces, 0)
        if len(self.traces) > 1:
            matched = match_collectives(self.traces, comm_patterns)
            apart = clocks(self.traces, comm_patterns)
            offset |= {int(r): round(1000 * o) for r, o in zip(apart["rank"], apart["offset_us"], strict=True)}
            if why := not_together(apart):
                self.notes.append(why)
            if not len(matched):
                self.notes.append("the ranks' collectives could not be matched: each rank is replayed alone")
        elif any((x.kind == COMMUNICATION).any() for x in own.values()):
            self.notes.append("one rank of several: its collectives last as recorded, waiting for peers included")
        self.ranks = {r: RankReplay(own[r], matched, offset[r]) for r in self.traces}
        for one in self.ranks.values():
            self.notes += [n for n in one.notes if n not in self.notes]
            self.remarks += [n for n in one.remarks if n not in self.remarks]
        #: Collectives of the hosts, such as ``gloo:all_gather``: what hosts wait for each other there is not told from their own time.
        self.host_meetings = sorted(
            {str(n) for t in self.traces.values() for n in t.events["name"].cat.categories if _ON_HOST.match(str(n))}
        )
        for r, t in self.traces.items():
            if "step_us_p50" in t.integrity.withheld:
                raise LabError(f"rank {r} cannot be replayed: {t.integrity.withheld['step_us_p50']}.")
            if (t.steps()["period_us"] <= 0).any():
                self.notes.append("steps overlap on the device, or their order there is another than on the host")
        self.measured_us = self._median({r: t.steps()["period_us"].to_numpy() for r, t in self.traces.items()})
        if not np.isfinite(self.measured_us):
            raise LabError(
                "the trace has no steps with device events, so there is nothing to replay; `trace summary` says what is missing."
            )
        if self.measured_us <= 0:
            raise LabError(
                f"the median step takes {self.measured_us:g} µs: its steps are not in order on the device, so there is nothing to replay; "
                "`trace integrity` says what is wrong."
            )

    def _median(self, periods: dict[int, np.ndarray]) -> float:
        """Median over the third step and later of the slowest rank's period, steps that every rank has."""
        tables = [pd.Series(periods[r], index=self.traces[r].step_windows.labels) for r in periods]
        whole = pd.concat(tables, axis=1).dropna()
        late = whole.iloc[SKIPPED_STEPS:] if len(whole) > SKIPPED_STEPS else whole
        return float(late.max(axis=1).median()) if len(late) else float("nan")

    def _pace_us(self) -> float:
        """Mean time from the last rank's begin of a step to its begin of the next, from the third step on; NaN where ranks have other steps."""
        labels = [list(self.traces[r].step_windows.labels) for r in self.ranks]
        if any(x != labels[0] for x in labels):
            return float("nan")
        steps = np.diff(np.max([one.starts_us() for one in self.ranks.values()], axis=0))
        late = steps[SKIPPED_STEPS:] if len(steps) > SKIPPED_STEPS else steps
        return float(np.nanmean(late)) if np.isfinite(late).any() else float("nan")

    def predicted_us(self, plain: Outcome, changed: Outcome) -> float:
        """The step of an edited replay. Where ranks shift against each other the largest of their periods in a step may grow although the job
        became quicker; then it is the replayed step and what its mean changed by."""
        return (
            plain.step_us - (plain.pace_us - changed.pace_us) if self.ranks_shift(plain, changed) else changed.step_us
        )

    def ranks_shift(self, plain: Outcome, changed: Outcome) -> bool:
        """Whether median step and mean pace of several ranks go opposite ways."""
        return len(self.ranks) > 1 and changed.step_us > plain.step_us and changed.pace_us < plain.pace_us

    def site(self, wanted: str) -> str:
        sites = list(dict.fromkeys(s for r in self.ranks.values() for s in r.waits["site"]))
        if wanted in sites:
            return wanted
        near = [s for s in sites if wanted in s]
        if len(near) == 1:
            return near[0]
        raise unknown("drop_site", wanted, near or sites)

    def pattern(self, what: str, pattern: str | None, categories: tuple[str, ...]) -> str | None:
        if pattern is None:
            return None
        if not pattern:
            raise LabError(f"{what}='' would match every name; give a part of one, or '.' for all of them.")
        try:
            search = re.compile(pattern).search
        except re.error as err:
            raise LabError(f"{what}={pattern!r} is no regular expression: {err}.") from err
        for one in self.ranks.values():
            line = one.line
            mine = np.isin(line.category, categories)
            if any(search(str(line.names[c])) for c in np.unique(line.name[mine])):
                return pattern
        names = [
            str(n)
            for one in self.ranks.values()
            for n in one.line.names[np.unique(one.line.name[np.isin(one.line.category, categories)])]
        ]
        there = "; ".join(n[:60] for n in dict.fromkeys(names[:4])) or "none"
        raise LabError(f"{what}={pattern!r} matches nothing in the trace; there are, for one: {there}.")

    def run(self, edit: Edit) -> Outcome:
        tell("replaying", 1.0)
        plain = Edit()
        going = {
            r: one.replay(edit if edit.ranks is None or r in edit.ranks else plain) for r, one in self.ranks.items()
        }
        waiting: dict[int, int] = {}
        for r, g in list(going.items()):
            got = next(g, None)
            if got is not None:
                waiting[r] = got
        # every live rank stands at its next matched collective, which they enter in the same order
        while waiting:
            last = max(waiting.values())
            for r in list(waiting):
                try:
                    waiting[r] = going[r].send(last)
                except StopIteration:
                    del waiting[r]
        return Outcome(
            step_us=self._median({r: one.periods() for r, one in self.ranks.items()}),
            pace_us=self._pace_us(),
            dry_us=max(one.dry_us() for one in self.ranks.values()),
            wait_ns={r: one.waited.copy() for r, one in self.ranks.items()},
        )

    def wait_table(self, plain: Outcome, changed: Outcome) -> pd.DataFrame:
        """Waits of the steps from the third on, µs a step (median), the rank that waits longest."""
        tables = []
        for r, one in self.ranks.items():
            steps = pd.Index(self.traces[r].step_windows.labels)
            late = steps[SKIPPED_STEPS:] if len(steps) > SKIPPED_STEPS else steps
            rows = one.waits.assign(replayed_us=plain.wait_ns[r] / 1000, predicted_us=changed.wait_ns[r] / 1000)
            rows = rows[rows["step"].isin(late).to_numpy()].rename(columns={"dur_us": "measured_us"})
            if not len(rows):
                continue
            per = rows.groupby(["kind", "site", "step"], sort=False)[
                ["measured_us", "replayed_us", "predicted_us"]
            ].sum()
            spread = {
                c: per[c].unstack("step", fill_value=0).reindex(columns=late, fill_value=0).median(axis=1)
                for c in WAIT_COLUMNS[2:]
            }
            tables.append(pd.DataFrame(spread).reset_index())
        if not tables:
            return pd.DataFrame({c: pd.Series(dtype=object if c in ("kind", "site") else float) for c in WAIT_COLUMNS})
        table = pd.concat(tables).groupby(["kind", "site"], sort=False).max().reset_index()
        return table[list(WAIT_COLUMNS)].sort_values("measured_us", ascending=False, ignore_index=True)

    def best(self, plain: Outcome, count: int) -> pd.DataFrame:
        """The best single edits: each wait site, all synchronises, the largest kernels gone, each kind of copy, no host time between calls."""
        tries: list[tuple[str, str, Edit]] = []
        waits = pd.concat([one.waits for one in self.ranks.values()])
        inside = waits[(waits["step"] >= 0).to_numpy()]
        for site, kind in inside.drop_duplicates("site")[["site", "kind"]].itertuples(index=False):
            if kind != "event_wait":
                tries.append(("make non-blocking", site, Edit(drop_site=site)))
        if len(tries) > 1:
            tries.append(("make non-blocking", "every synchronise and blocking copy", Edit(drop=DROPS["sync"])))
        for category, what, most in (("kernel", "remove kernel", 6), ("gpu_memcpy", "remove copy", 4)):
            total: dict[str, int] = {}
            for one in self.ranks.values():
                line = one.line
                mine = line.category == category
                sums = np.bincount(line.name[mine], weights=(line.end - line.start)[mine], minlength=len(line.names))
                for code in np.flatnonzero(sums).tolist():
                    total[str(line.names[code])] = total.get(str(line.names[code]), 0) + int(sums[code])
            for name in sorted(total, key=lambda n: -total[n])[:most]:
                exact = f"^{re.escape(name)}$"
                tries.append((what, name, Edit(drop_kernel=exact) if category == "kernel" else Edit(drop_copy=exact)))
        tries.append(("host work between calls × 0.5", "", Edit(scale_host=0.5)))
        rows = []
        for what, target, edit in tries:
            gain = plain.step_us - self.predicted_us(plain, self.run(edit))
            rows.append((what, target, plain.step_us - gain, gain))
        table = pd.DataFrame(rows, columns=list(EDIT_COLUMNS))
        return table.sort_values("gain_us", ascending=False, ignore_index=True).head(count)
