"""A scene: rows of one or several traces under each other on one clock, with launches, waits, steps and what is in doubt. No plotly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import clocks
from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet
from dspark_lab.view.browse.tracks import Names, Track, tracks_of
from dspark_lab.view.doubts import doubtful_steps, doubts
from dspark_lab.view.rows import records


@dataclass(frozen=True, eq=False)
class Group:
    """One trace of the scene: its name, the time that is 0, what is to be known before its times are believed."""

    name: str
    trace: Trace
    zero_ns: int
    doubts: tuple[str, ...]
    bands: tuple[tuple[int, int, str], ...]
    """(start, end, why) of steps whose idle time is none: events of the device are missing."""


@dataclass(frozen=True, eq=False)
class Scene:
    """All times are ns after the zero of their group. ``arrows``: launch end, its track, start on the device, its track, sorted by the first."""

    groups: tuple[Group, ...]
    tracks: tuple[Track, ...]
    names: np.ndarray
    arrows: np.ndarray
    flags: pd.DataFrame
    """Waits: at, dur, track, text."""
    steps: pd.DataFrame
    """Where steps begin: at, group, step."""
    note: str = ""

    @property
    def lo(self) -> int:
        return min((int(t.row.start[0]) for t in self.tracks if len(t.row)), default=0)

    @property
    def hi(self) -> int:
        return max((int(t.row.reach[-1]) for t in self.tracks if len(t.row)), default=1)

    @property
    def num_events(self) -> int:
        return sum(len(t.row) for t in self.tracks)


def scene(traces: Mapping[str, Trace | TraceSet], *, step: int | None = None) -> Scene:
    """The scene of traces by name. Several are aligned where ``step`` begins (on the device, without one on the host).

    Without ``step``: one trace begins at 0 with its first event, several are aligned on their first common step from the third on.
    Ranks of a set stay on one clock, put right by their collectives. Raises `LabError` where a trace has no such step.
    """
    if not traces:
        raise LabError("there is nothing to browse; give a trace, or several by name.")
    several = len(traces) > 1
    step = _common(traces) if step is None and several else step
    names = Names()
    groups: list[Group] = []
    tracks: list[Track] = []
    notes = [f"aligned where step {step} begins"] * (step is not None)
    for label, opened in traces.items():
        ranks = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
        offsets, said = _offsets(ranks)
        notes += [said] * bool(said and said not in notes)
        zero = _zero(label, ranks, offsets, step)
        for rank, trace in ranks.items():
            name = f"{label} · rank {rank}" if len(ranks) > 1 and label else f"rank {rank}" if len(ranks) > 1 else label or f"rank {rank}"  # fmt: skip
            own = zero - offsets[rank]
            groups.append(
                Group(
                    name=name,
                    trace=trace,
                    zero_ns=own,
                    doubts=doubts(trace, alone=len(ranks) == 1),
                    bands=_bands(trace, own),
                )
            )
            tracks += tracks_of(trace, len(groups) - 1, own, names)
    return Scene(
        groups=tuple(groups), tracks=tuple(tracks), names=names.table, arrows=_arrows(groups, tracks), flags=_flags(groups, tracks),
        steps=_steps(groups), note=" · ".join(notes),
    )  # fmt: skip


# -- one clock ---------------------------------------------------------------------------------------------------------


def _common(traces: Mapping[str, Trace | TraceSet]) -> int | None:
    """The third common step, or the first of fewer; None where the traces share none."""
    found = [set(_lead(t).steps()["step"].tolist()) for t in traces.values()]
    shared = sorted(set.intersection(*found))
    return None if not shared else shared[min(2, len(shared) - 1)]


def _lead(opened: Trace | TraceSet) -> Trace:
    return opened[min(opened)] if isinstance(opened, TraceSet) else opened


def _offsets(ranks: Mapping[int, Trace]) -> tuple[dict[int, int], str]:
    """What is added to each rank's times to put it on the first one's clock, ns; and in words how sure that is."""
    out, note = dict.fromkeys(ranks, 0), ""
    if len(ranks) > 1:
        apart = clocks(ranks)
        out |= {int(r): -round(1000 * o) for r, o in zip(apart["rank"], apart["offset_us"], strict=True)}
        worst = float(apart["uncertainty_us"].max()) if len(apart) else float("nan")
        note = (
            f"ranks on one clock by their collectives, to ±{worst:.1f} µs"
            if len(apart)
            else "ranks by their own clocks: no collectives match"
        )
    return out, note


def _zero(label: str, ranks: Mapping[int, Trace], offsets: Mapping[int, int], step: int | None) -> int:
    """The time of the first rank's clock that is 0."""
    if step is None:
        return min((t.t0_ns + offsets[r] for r, t in ranks.items() if len(t.events)), default=0)
    found = []
    for r, t in ranks.items():
        rows = t.steps()
        rows = rows[rows["step"] == step]
        for device, host in zip(rows["device_start_ns"], rows["host_start_ns"], strict=True):
            found.append((int(device) if device > 0 else int(host)) + offsets[r])
    if not found:
        have = sorted({int(s) for t in ranks.values() for s in t.steps()["step"]})
        said = f"steps {have[0]} to {have[-1]}" if have else "no steps"
        raise LabError(f"step={step} is not in {label or 'the trace'}, which has {said}.")
    return min(found)


# -- what hangs on them ------------------------------------------------------------------------------------------------


def _arrows(groups: list[Group], tracks: list[Track]) -> np.ndarray:
    """int64 rows (end of the launch call, its track, start of the first event it launched, that one's track)."""
    out = []
    for g, group in enumerate(groups):
        calls, device = group.trace.linked.calls, group.trace.linked.device
        if not len(calls) or not len(device):
            continue
        track_of_call, track_of_event = np.full(len(calls), -1), np.full(len(device), -1)
        for i, t in enumerate(tracks):
            if t.group == g and t.source in ("calls", "device"):
                (track_of_call if t.source == "calls" else track_of_event)[t.index] = i
        known = np.flatnonzero(device["call"].to_numpy() >= 0)
        start = device["ts_ns"].to_numpy()
        known = known[np.argsort(start[known], kind="stable")]
        call, first = np.unique(device["call"].to_numpy()[known], return_index=True)
        event = known[first]
        out.append(np.stack([calls["end_ns"].to_numpy()[call] - group.zero_ns, track_of_call[call], start[event] - group.zero_ns, track_of_event[event]], axis=1))  # fmt: skip
    table = np.concatenate(out) if out else np.zeros((0, 4), dtype=np.int64)
    table = table[(table[:, 1] >= 0) & (table[:, 3] >= 0)]
    return table[np.argsort(table[:, 0], kind="stable")]


def _flags(groups: list[Group], tracks: list[Track]) -> pd.DataFrame:
    """Waits of the host, by time: at, dur, track (−1: its thread has no row), text."""
    out = []
    for g, group in enumerate(groups):
        rows = group.trace.waits()
        at = {t.label.split()[1]: i for i, t in enumerate(tracks) if t.group == g and t.kind == "calls"}
        said = [
            f"{name} ({kind.replace('_', ' ')}, step {step}) {'' if str(site).startswith(str(name)) else 'at '}{site}"
            for name, kind, step, site in zip(rows["name"], rows["kind"], rows["step"], rows["site"], strict=True)
        ]
        out.append(
            pd.DataFrame(
                {
                    "at": rows["ts_ns"].to_numpy() - group.zero_ns,
                    "dur": np.rint(rows["dur_us"].to_numpy() * 1e3).astype(np.int64),
                    "track": [at.get(str(t), -1) for t in rows["tid"]],
                    "kind": rows["kind"].to_numpy(),
                    "text": said,
                }
            )
        )
    return pd.concat(out, ignore_index=True).sort_values("at", ignore_index=True)


def _steps(groups: list[Group]) -> pd.DataFrame:
    """Where each step begins on the device, without one on the host: at, group, step."""
    out = []
    for g, group in enumerate(groups):
        rows = group.trace.steps()
        column = "host_start_ns" if group.trace.is_cpu_only else "device_start_ns"
        rows = rows[(rows[column] > 0).to_numpy()]
        out.append(
            pd.DataFrame({"at": rows[column].to_numpy() - group.zero_ns, "group": g, "step": rows["step"].to_numpy()})
        )
    return pd.concat(out, ignore_index=True).sort_values("at", ignore_index=True)


def _bands(trace: Trace, zero: int) -> tuple[tuple[int, int, str], ...]:
    """Steps whose device events are not all there, on the device's clock where it has any event of them, else on the host's."""
    missing = doubtful_steps(trace)
    out = []
    for r in records(trace.steps()):
        if why := missing.get(r["step"], ""):
            a, b = r["host_start_ns"], r["host_end_ns"]
            if r["device_start_ns"] > 0:  # to the next step on the device, else to where its record ends
                a, us = r["device_start_ns"], r["period_us"] if np.isfinite(r["period_us"]) else r["gpu_span_us"]
                b = a + us * 1e3 if us > 0 else b
            out.append((int(a) - zero, int(max(a, b)) - zero, f"step {r['step']}: {why}"))
    return tuple(out)
