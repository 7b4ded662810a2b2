"""One capture of a side of a diff: its steps, and their time by cause, weighted so that it sums to the median step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.breakdown import breakdown
from dspark_lab.analysis.device_line import COMMUNICATION, DeviceLine, lines
from dspark_lab.analysis.syncs import charge
from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.summary import SKIPPED_STEPS


@dataclass(frozen=True)
class Capture:
    opened: Trace | TraceSet
    periods_us: np.ndarray
    step_us: float
    parts: pd.DataFrame
    lead_us: float
    copies: dict[tuple[str, str], float]
    waits: dict[tuple[str, str], float]
    withheld: str


def read_capture(source: Any, comm_patterns: Mapping[str, str] | None) -> Capture:
    opened = open_trace(source)
    every = lines(opened, comm_patterns)
    periods = pd.concat(
        [pd.Series(x.trace.steps()["period_us"].to_numpy(), index=x.trace.step_windows.labels) for x in every.values()], axis=1, keys=list(every)
    )  # fmt: skip
    whole = periods.dropna()
    late = whole.iloc[SKIPPED_STEPS:] if len(whole) > SKIPPED_STEPS else whole
    if not len(late):
        where = getattr(opened, "path", None)
        raise LabError(
            f"{where} has no steps with device events to compare; `dspark-lab trace summary` says what is missing."
        )
    slowest = late.idxmax(axis=1)
    values = late.max(axis=1).to_numpy()
    weights = _weights(values)
    broken = breakdown(opened, comm_patterns=comm_patterns)
    broken = broken[broken["step"].isin(late.index).to_numpy() & (broken["withheld"] != "").to_numpy()]
    withheld = _withheld(every, broken)
    sums = {r: _Sums(x) for r, x in every.items()} if not withheld else {}
    for step, rank, weight in zip(late.index, slowest, weights, strict=True) if sums else ():
        sums[rank].add(int(step), float(weight), 1.0 / len(late))
    parts = (
        pd.concat([x.table() for x in sums.values()] or [pd.DataFrame(columns=["kind", "name", "site", "us", "count"])])
        .groupby(["kind", "name", "site"], sort=False)[["us", "count"]]
        .sum()
        .reset_index()
    )
    first = next(iter(every.values())).trace
    steps = first.steps()
    n = max(len(late), 1)
    copies = first.memcpy()
    copies = copies[copies["step"].isin(late.index).to_numpy()]
    waits = first.waits()
    waits = waits[waits["step"].isin(late.index).to_numpy() & (waits["kind"] != "event_wait").to_numpy()]
    return Capture(
        opened=opened,
        periods_us=values,
        step_us=float(np.median(values)),
        parts=parts,
        lead_us=float(steps[steps["step"].isin(late.index)]["launch_lead_us"].median()),
        copies=_per_step(copies["kind"], copies["bytes"], n),
        waits=_per_step(waits["name"], waits["site"], n),
        withheld=withheld,
    )


def _withheld(every: Mapping[int, DeviceLine], broken: pd.DataFrame) -> str:
    """Why the captures' causes cannot be told; "" where they can."""
    for line in every.values():
        integrity = line.trace.integrity
        if "step_us_p50" in integrity.withheld:
            return integrity.withheld["step_us_p50"]
    return f"step {broken['step'].iloc[0]}: {broken['withheld'].iloc[0]}" if len(broken) else ""


def _weights(values: np.ndarray) -> np.ndarray:
    """Weights of the steps, as equal as can be, with which their mean is their median: parts then sum to the median, and an outlier weighs little."""
    n = len(values)
    apart = values - values.mean()
    spread = float((apart**2).sum())
    even = np.full(n, 1.0 / n)
    return even if spread == 0 else even + apart * (float(np.median(values)) - float(values.mean())) / spread


class _Sums:
    """A rank's steps by cause, weighted and summed."""

    def __init__(self, line: DeviceLine) -> None:
        self.line, self.owed, self.waits = line, charge(line), line.trace.waits()
        self.place = {int(s): k for k, s in enumerate(line.trace.step_windows.labels)}
        self.ns, self.count = (np.zeros((3, len(line.names))) for _ in range(2))
        self.causes: dict[tuple[str, str, str], list[float]] = {}
        self.sites = list(zip(self.waits["name"].astype(str), self.waits["site"].astype(str), strict=True))

    def _put(self, kind: str, name: str, site: str, ns: float, count: float) -> None:
        if ns or count:
            was = self.causes.setdefault((kind, name, site), [0.0, 0.0])
            was[0] += ns
            was[1] += count

    def add(self, step: int, weight: float, share: float) -> None:
        """Add the period of one step: its time with ``weight``, what is counted with ``share``."""
        line, one = self.line, self.line.slices[self.place[step]]
        kind, code = line.kind[one.events], line.name[one.events]
        peer = np.where(kind == COMMUNICATION, np.minimum(line.peer_wait[one.events], one.own_ns), 0)
        np.add.at(self.ns, (kind, code), weight * (one.own_ns - peer))
        np.add.at(self.count, (kind, code), share)
        self._put(
            "peer_wait",
            "waiting for the slowest rank in collectives",
            "",
            weight * float(peer.sum()),
            share * float((peer > 0).sum()),
        )
        host, graph, other = line.gap_parts(one)
        late = {int(g): int(h) for g, h in zip(one.gaps[host > 0], host[host > 0], strict=True)}
        charged: dict[int, float] = {}
        if late:
            owed = self.owed
            a, b = np.searchsorted(owed.gap, min(late)), np.searchsorted(owed.gap, max(late), side="right")
            for g, w, ns in zip(owed.gap[a:b].tolist(), owed.wait[a:b].tolist(), owed.ns[a:b].tolist(), strict=True):
                if g in late:  # a gap that the step's window cuts pays in proportion
                    charged[w] = charged.get(w, 0.0) + ns * late[g] / float(line.host_ns[g])
        for w, ns in charged.items():
            name, site = self.sites[w] if w >= 0 else ("host work before launches", "")
            self._put("wait" if w >= 0 else "bubble", name, site, weight * ns, share)
        self._put(
            "launch",
            "launch latency and gaps between launches",
            "",
            weight * float(other.sum()),
            share * float((other > 0).sum()),
        )
        self._put(
            "graph_gap",
            "gaps between nodes of a graph",
            "",
            weight * float(graph.sum()),
            share * float((graph > 0).sum()),
        )

    def table(self) -> pd.DataFrame:
        """kind, name, site, us, count."""
        names = self.line.names
        rows = [
            (word, str(names[c]), "", float(self.ns[k, c]), float(self.count[k, c]))
            for k, word in enumerate(("kernel", "communication", "copy"))
            for c in np.flatnonzero(self.count[k]).tolist()
        ]
        rows += [(*key, ns, count) for key, (ns, count) in self.causes.items()]
        out = pd.DataFrame(rows, columns=["kind", "name", "site", "us", "count"])
        out["us"] /= 1000.0
        return out


def _per_step(a: pd.Series, b: pd.Series, num_steps: int) -> dict[tuple[str, str], float]:
    """How often a step each pair of values stands there."""
    counts: dict[tuple[str, str], float] = {}
    for key in zip(a.astype(str), b.astype(str), strict=True):
        counts[key] = counts.get(key, 0.0) + 1.0 / num_steps
    return counts
