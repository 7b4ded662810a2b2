"""What-if: a trace replayed as host calls and device events that wait for each other, with something left out.

Nothing in the model is fitted to a period. From the trace it takes what each thing took by itself (host calls, the host's time between
them, kernels) and, pooled over all its like, what follows from what: how long after its launch an event starts on an idle device, how
long after its predecessor on a busy one, how long after the awaited work a wait returns. The replay of the unedited trace is therefore a
test: its error stands beside every prediction.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.breakdown import COMMUNICATION, QUEUED_NS, DeviceLine, lines
from dspark_lab.analysis.comm import clocks, match_collectives
from dspark_lab.analysis.syncs import WAITED_NS, event_age, records
from dspark_lab.errors import LabError, unknown
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.launches import NONE, first_at, last_at, named
from dspark_lab.trace.summary import SKIPPED_STEPS

DROPS: dict[str, tuple[str, ...]] = {
    "sync": ("sync", "blocking_copy"),
    "event_wait": ("event_wait",),
    "all": ("sync", "blocking_copy", "event_wait"),
    "none": (),
}
WAIT_COLUMNS = ("kind", "site", "measured_us", "replayed_us", "predicted_us")
EDIT_COLUMNS = ("edit", "target", "predicted_us", "gain_us")
#: A replay of the unedited trace that is further off than this is no basis for an exact prediction, percent.
EXACT_PCT = 1.0
_PLAIN, _DRAIN, _EVENT, _OWN = 0, 1, 2, 3
_RETURN_NS, _CALL_NS, _START_NS = 5_000, 5_000, 5_000


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What is changed before the replay.

    drop: kinds of waits that no longer hold the host; drop_site restricts them to one site (and takes any kind). Kernels and copies whose
    names match are removed, with their launch call where nothing else hangs on it. Factors scale kernels by pattern, the host's time
    between calls, and the calls themselves (``launch_cost``: the profiler's cost on host calls, where you know it). ranks: only on these.
    """

    drop: tuple[str, ...] = ()
    drop_site: str | None = None
    drop_kernel: str | None = None
    drop_copy: str | None = None
    scale_kernel: Mapping[str, float] = field(default_factory=dict)
    scale_host: float = 1.0
    launch_cost: float = 1.0
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        said = []
        if self.drop_site is not None:
            said.append(f"no waiting at {self.drop_site}")
        elif self.drop:
            said.append(f"no waiting of kind {', '.join(self.drop)}")
        said += [
            f"without {what} {p}"
            for what, p in (("kernel", self.drop_kernel), ("copy", self.drop_copy))
            if p is not None
        ]
        said += [f"kernels {p} × {f:g}" for p, f in self.scale_kernel.items()]
        said += [
            f"{what} × {f:g}"
            for what, f in (("host time", self.scale_host), ("call cost", self.launch_cost))
            if f != 1.0
        ]
        on = "" if self.ranks is None else f" on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return "; ".join(said) + on if said else "unedited"


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A prediction. All times are of the profiled capture, µs; medians over the third step and later, over ranks the maximum.

    measured_us: the trace's step. replayed_us: the model on the unedited trace; replay_error_pct between them. predicted_us: the replay
    with the edit. exact: False where the trace does not show what waits for what or the replay error is 1 % or more; ``notes`` say why, and what was assumed. waits: wait of the host a step by site: measured, replayed, predicted; an edit that moves the bill to the
    next wait shows there. edits: the best single edits by predicted gain.
    """

    edit: Edit
    measured_us: float
    replayed_us: float
    predicted_us: float
    exact: bool
    notes: tuple[str, ...]
    waits: pd.DataFrame
    edits: pd.DataFrame
    profiled: bool = True

    @property
    def replay_error_pct(self) -> float:
        return 100.0 * (self.replayed_us / self.measured_us - 1.0)

    @property
    def gain_us(self) -> float:
        """Measured minus predicted; the replay's own error is in it."""
        return self.measured_us - self.predicted_us

    @property
    def sentence(self) -> str:
        """The prediction in words."""
        pct = 100.0 * self.gain_us / self.measured_us
        moved = self.waits[(self.waits["predicted_us"] - self.waits["replayed_us"]).to_numpy() > 20.0]
        moved = ", ".join(
            f"{s} ({p - r:+.0f} µs)"
            for s, p, r in zip(moved["site"], moved["predicted_us"], moved["replayed_us"], strict=True)
        )
        return (
            f"{self.edit}: {self.predicted_us:.0f} µs a step instead of {self.measured_us:.0f} ({-pct:+.1f} %), in this profiled capture; "
            f"the replay of the unedited trace is off by {self.replay_error_pct:+.2f} %"
            + (f"; the host then waits at {moved}" if moved else "")
            + ("" if self.exact else "; a bound, not exact: " + "; ".join(self.notes))
            + "."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "statistic": "step_us_p50",
            "profiled": self.profiled,
            "edit": str(self.edit),
            "measured_us": self.measured_us,
            "replayed_us": self.replayed_us,
            "replay_error_pct": self.replay_error_pct,
            "predicted_us": self.predicted_us,
            "gain_us": self.gain_us,
            "exact": self.exact,
            "notes": list(self.notes),
            "waits": self.waits.to_dict("records"),
            "edits": self.edits.to_dict("records"),
            "text": self.sentence,
        }

    def _repr_html_(self) -> str:
        def table(x: pd.DataFrame) -> str:
            return x.to_html(index=False, float_format=lambda v: f"{v:.1f}")

        return f"<p>{self.sentence}</p>{table(self.waits)}{table(self.edits)}"


def whatif(
    source: Any,
    *,
    drop: str = "none",
    drop_site: str | None = None,
    drop_kernel: str | None = None,
    drop_copy: str | None = None,
    scale_kernel: Mapping[str, float] | None = None,
    scale_host: float = 1.0,
    launch_cost: float = 1.0,
    ranks: Sequence[int] | None = None,
    num_edits: int = 10,
    comm_patterns: Mapping[str, str] | None = None,
) -> WhatIf:
    """Predict the step of a trace with waits, kernels, copies or host time changed.

    Args:
        source: a trace, a folder of ranks (replayed together, collectives across them), or what `open_trace` takes.
        drop: ``sync`` (synchronises and blocking copies), ``event_wait``, ``all``, ``none``: waits that no longer hold the host. The copy itself stays.
        drop_site: only waits of this site, as ``Trace.waits`` names it (or a part of the name that fits one site).
        drop_kernel, drop_copy: remove kernels or copies whose name matches this regular expression.
        scale_kernel: ``{regular expression: factor}`` on durations.
        scale_host, launch_cost: factors on the host's time between calls, and on calls (the profiler's cost, if you know it).
        ranks: edit only these ranks, such as the straggler that `ranks` names; what the others then wait less for it is in the prediction.
        num_edits: how many single edits to try and rank; 0 for none.

    Raises:
        LabError: an edit that matches nothing, or a trace without steps on a device.
    """
    if drop not in DROPS:
        raise unknown("drop", drop, DROPS)
    for what, factor in (("scale_host", scale_host), ("launch_cost", launch_cost), *((f"scale_kernel[{k!r}]", f) for k, f in (scale_kernel or {}).items())):  # fmt: skip
        if not (np.isfinite(factor) and factor >= 0):
            raise LabError(f"{what}={factor} is no factor; give a number from 0 on.")
    model = _Model(open_trace(source), comm_patterns)
    for rank in ranks if ranks is not None else ():
        if rank not in model.ranks:
            raise unknown("ranks", rank, model.ranks)
    edit = Edit(
        drop=DROPS[drop],
        drop_site=model.site(drop_site) if drop_site is not None else None,
        drop_kernel=model.pattern("drop_kernel", drop_kernel, ("kernel",)),
        drop_copy=model.pattern("drop_copy", drop_copy, ("gpu_memcpy", "gpu_memset")),
        scale_kernel=dict(scale_kernel or {}),
        scale_host=scale_host,
        launch_cost=launch_cost,
        ranks=tuple(ranks) if ranks is not None else None,
    )
    for p in edit.scale_kernel:
        model.pattern("scale_kernel", p, ("kernel",))
    plain, changed = model.run(Edit()), model.run(edit)
    error = 100.0 * (plain.step_us / model.measured_us - 1.0)
    if not abs(error) < EXACT_PCT:
        model.notes.append(
            f"the replay of the unedited trace is off by {error:+.1f} %, so the model does not hold here"
        )
    return WhatIf(
        edit=edit,
        measured_us=model.measured_us,
        replayed_us=plain.step_us,
        predicted_us=changed.step_us,
        exact=not model.notes,
        notes=(*model.notes, *model.remarks),
        waits=model.wait_table(plain, changed),
        edits=model.best(plain, num_edits) if num_edits > 0 else pd.DataFrame(columns=list(EDIT_COLUMNS)),
    )


@dataclass
class _Outcome:
    step_us: float
    wait_ns: dict[int, np.ndarray]


class _Model:
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
            if not len(matched):
                self.notes.append("the ranks' collectives could not be matched: each rank is replayed alone")
        elif any((x.kind == COMMUNICATION).any() for x in own.values()):
            self.notes.append("one rank of several: its collectives last as recorded, waiting for peers included")
        self.ranks = {r: _Rank(own[r], matched, offset[r]) for r in self.traces}
        for one in self.ranks.values():
            self.notes += [n for n in one.notes if n not in self.notes]
            self.remarks += [n for n in one.remarks if n not in self.remarks]
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

    def _median(self, periods: dict[int, np.ndarray]) -> float:
        """Median over the third step and later of the slowest rank's period, steps that every rank has."""
        tables = [pd.Series(periods[r], index=self.traces[r].step_windows.labels) for r in periods]
        whole = pd.concat(tables, axis=1).dropna()
        late = whole.iloc[SKIPPED_STEPS:] if len(whole) > SKIPPED_STEPS else whole
        return float(late.max(axis=1).median()) if len(late) else float("nan")

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
        try:
            search = re.compile(pattern).search
        except re.error as err:
            raise LabError(f"{what}={pattern!r} is no regular expression: {err}.") from err
        for one in self.ranks.values():
            line = one.line
            mine = np.isin(line.category, categories)
            if any(search(str(line.names[c])) for c in np.unique(line.name[mine])):
                return pattern
        raise LabError(f"{what}={pattern!r} matches nothing in the trace.")

    def run(self, edit: Edit) -> _Outcome:
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
        return _Outcome(
            step_us=self._median({r: one.periods() for r, one in self.ranks.items()}),
            wait_ns={r: one.waited.copy() for r, one in self.ranks.items()},
        )

    def wait_table(self, plain: _Outcome, changed: _Outcome) -> pd.DataFrame:
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

    def best(self, plain: _Outcome, count: int) -> pd.DataFrame:
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
            gain = plain.step_us - self.run(edit).step_us
            rows.append((what, target, plain.step_us - gain, gain))
        table = pd.DataFrame(rows, columns=list(EDIT_COLUMNS))
        return table.sort_values("gain_us", ascending=False, ignore_index=True).head(count)


class _Rank:
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
