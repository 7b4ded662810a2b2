"""``Trace``: the events of one rank and the tables made of them. ``TraceSet``: several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from dspark_lab.trace.events import EventTable, in_categories
from dspark_lab.trace.integrity import Integrity, examine
from dspark_lab.trace.launches import Linked, launches, link
from dspark_lab.trace.periods import sound_ends, step_table
from dspark_lab.trace.steps import StepWindows, find_steps
from dspark_lab.trace.waits import blocking_copies, find_waits


class Trace:
    """The events of one capture of one rank.

    Tables are DataFrames with all their columns even when empty. Absolute times are int64 nanoseconds (``_ns``), durations µs
    (``_us``); −1 stands for an integer that the trace does not have, and for the step of what lies outside every step.

    Attributes:
        events: every event with a duration, columns as in ``dspark_lab.trace.events``.
        path, name, rank: file, its name without suffixes, rank.
        profiled: True: a capture comes from a profiler, whose presence slows host calls; never compare it with unprofiled steps.
        header: the keys of the file beside its events.
    """

    profiled = True

    def __init__(
        self,
        table: EventTable,
        *,
        path: Path,
        rank: int = 0,
        rank_source: str = "index",
        step_pattern: str | None = None,
    ) -> None:
        self.events = table.events
        self.header = table.header
        self.labels = table.labels
        self.path = path
        self.name = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace").removesuffix(".pt")
        self.rank = rank
        self._rank_source = rank_source
        self._log = table.log
        self.step_pattern = step_pattern
        self.step_windows: StepWindows = find_steps(table.events, step_pattern)

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, rank {self.rank}, {len(self.step_windows)} steps, {len(self.events)} events, profiled)"

    def note(self, message: str) -> None:
        """Adds a message to ``integrity``."""
        self._log.notes.append(message)
        self.__dict__.pop("integrity", None)

    @property
    def t0_ns(self) -> int:
        """Start of the first event, ns; 0 in a trace without events."""
        return int(self.events["ts_ns"].iloc[0]) if len(self.events) else 0

    @property
    def t1_ns(self) -> int:
        """End of the last event, ns."""
        return int((self.events["ts_ns"] + self.events["dur_ns"]).max()) if len(self.events) else 0

    @cached_property
    def vendor(self) -> str | None:
        """``cuda``, ``rocm`` or None where no device took part; by the names of runtime calls, else by the header."""
        calls = self._linked.calls["name"].astype(str)
        if calls.str.startswith("hip").any() or any(k.startswith(("hip_", "roc")) for k in self.header):
            return "rocm" if not self.is_cpu_only else None
        return None if self.is_cpu_only else "cuda"

    @cached_property
    def is_cpu_only(self) -> bool:
        """No device event and no launch call: steps are wall time of the host."""
        linked = self._linked
        return not len(linked.device) and not (linked.calls["is_launch"] | linked.calls["is_graph"]).any()

    @cached_property
    def has_stacks(self) -> bool:
        """Whether Python frames were recorded."""
        return bool(in_categories(self.events, ("python_function",)).any())

    @property
    def device_name(self) -> str | None:
        """Name of the device the header speaks of."""
        found = self.header.get("deviceProperties")
        return str(found[0].get("name")) if isinstance(found, list) and found and isinstance(found[0], dict) else None

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job, as the header tells it; None where it does not or tells nonsense."""
        told = self.header.get("distributedInfo")
        size = told.get("world_size") if isinstance(told, dict) else None
        return size if isinstance(size, int) and self.rank < size <= 1 << 16 else None

    @cached_property
    def integrity(self) -> Integrity:
        """What was mended, what is missing, what is withheld for it."""
        return examine(
            self._log,
            self.step_windows,
            self._linked,
            self._launches,
            rank=self.rank,
            rank_source=self._rank_source,
            cpu_only=self.is_cpu_only,
        )

    def steps(self) -> pd.DataFrame:
        """One row a step; columns as in ``dspark_lab.trace.periods.step_table``."""
        return self._steps.copy()

    def waits(self) -> pd.DataFrame:
        """One row a wait of the host; columns as in ``dspark_lab.trace.waits.find_waits``."""
        return self._waits.copy()

    def launches(self) -> pd.DataFrame:
        """One row a launch call of a kernel or graph; columns as in ``dspark_lab.trace.launches.launches``."""
        return self._launches.copy()

    def device_events(self) -> pd.DataFrame:
        """One row a kernel, copy or memset on the device: step, category, name, ts_ns, dur_us, sound_dur_us (cut where it outlasts
        the whole next event of its stream), bytes, device, stream, correlation, graph_id, graph_node_id, call, call_ts_ns,
        call_dur_us (of the call that launched it; "", −1, NaN unknown), in_graph."""
        return self._device_rows(np.ones(len(self._linked.device), dtype=bool))

    def _device_rows(self, wanted: np.ndarray) -> pd.DataFrame:
        device, calls = self._linked.device[wanted], self._linked.calls
        call = device["call"].to_numpy()
        known = call >= 0
        names, missing = calls["name"].astype(str).to_numpy(dtype=object), len(calls) == 0
        data = {
            "step": self.step_windows.label(device["place"].to_numpy()).astype(np.int64),
            "category": device["category"].to_numpy(),
            "name": device["name"],
            "ts_ns": device["ts_ns"],
            "dur_us": device["dur_ns"] / 1000,
            "sound_dur_us": (self._sound_ends[wanted] - device["ts_ns"].to_numpy()) / 1000,
            **{c: device[c] for c in ("bytes", "device", "stream", "correlation", "graph_id", "graph_node_id")},
            "call": "" if missing else np.where(known, names[call], ""),
            "call_ts_ns": -1 if missing else np.where(known, calls["ts_ns"].to_numpy()[call], -1),
            "call_dur_us": np.nan if missing else np.where(known, calls["dur_ns"].to_numpy()[call] / 1000, np.nan),
            "in_graph": False if missing else known & calls["is_graph"].to_numpy()[call],
        }
        return pd.DataFrame(data, index=device.index).reset_index(drop=True)

    def kernels(self) -> pd.DataFrame:
        """The kernels among ``device_events``, without category and bytes."""
        rows = self._device_rows((self._linked.device["category"] == "kernel").to_numpy())
        return rows.drop(columns=["category", "bytes"])

    def memcpy(self) -> pd.DataFrame:
        """The copies among ``device_events``, with kind (``HtoD (Pageable -> Device)``) and is_blocking (its call held the host)."""
        copies = (self._linked.device["category"] == "gpu_memcpy").to_numpy()
        rows = self._device_rows(copies).drop(columns="category")
        rows["kind"] = rows["name"].astype(str).str.removeprefix("Memcpy ").astype(object)
        rows["is_blocking"] = blocking_copies(self._linked)[copies]
        return rows

    def runtime(self) -> pd.DataFrame:
        """One row a runtime or driver call: step, category, name, ts_ns, dur_us, pid, tid, correlation."""
        calls = self._linked.calls
        return self._host_rows(calls, "category", "correlation")

    def phases(self) -> pd.DataFrame:
        """One row an annotated range that is no step (``dspark::draft``, ``ep::dispatch``, …): step, name, ts_ns, dur_us, pid, tid (host times)."""
        rows = self.events[in_categories(self.events, ("user_annotation",))]
        starts = rows["ts_ns"].isin(self.step_windows.start_ns) & rows["name"].astype(str).isin(
            set(self.step_windows.names)
        )
        return self._host_rows(rows[~starts.to_numpy()])

    def ops(self) -> pd.DataFrame:
        """One row a host op: step, name, ts_ns, dur_us, pid, tid, external_id."""
        return self._host_rows(self.events[in_categories(self.events, ("cpu_op",))], "external_id")

    def frames(self) -> pd.DataFrame:
        """One row a Python frame: step, name, ts_ns, dur_us, pid, tid, python_id, python_parent_id; empty without stacks."""
        return self._host_rows(
            self.events[in_categories(self.events, ("python_function",))], "python_id", "python_parent_id"
        )

    def _host_rows(self, rows: pd.DataFrame, *more: str) -> pd.DataFrame:
        step = self.step_windows.label(self.step_windows.of(rows["ts_ns"].to_numpy())).astype(np.int64)
        data = {
            "step": step,
            "name": rows["name"].to_numpy(),
            "ts_ns": rows["ts_ns"].to_numpy(),
            "dur_us": rows["dur_ns"].to_numpy() / 1000,
        }
        return pd.DataFrame(data | {c: rows[c].to_numpy() for c in ("pid", "tid", *more)})

    @property
    def linked(self) -> Linked:
        """Calls and device events in integer nanoseconds, joined by correlation; what ``dspark_lab.analysis`` works on. Not to be changed."""
        return self._linked

    @cached_property
    def _linked(self) -> Linked:
        return link(self.events, self.step_windows)

    @cached_property
    def _sound_ends(self) -> np.ndarray:
        return sound_ends(self._linked.device)

    @property
    def sound_ends_ns(self) -> np.ndarray:
        """End of each row of ``linked.device``, one that swallows the next of its stream cut there. Not to be changed."""
        return self._sound_ends

    def device_span_us(self) -> float:
        """From the first to the last device event that belongs to a step, µs; NaN without any."""
        device, inside = self._linked.device, (self._linked.device["place"] >= 0).to_numpy()
        if not inside.any():
            return float("nan")
        return (int(self._sound_ends[inside].max()) - int(device["ts_ns"].to_numpy()[inside].min())) / 1000

    @cached_property
    def _launches(self) -> pd.DataFrame:
        return launches(self._linked, self.step_windows)

    @cached_property
    def _waits(self) -> pd.DataFrame:
        return find_waits(self.events, self._linked, self.step_windows)

    @cached_property
    def _steps(self) -> pd.DataFrame:
        return step_table(
            self._linked,
            self.step_windows,
            self._launches,
            self._waits,
            profiled=self.profiled,
            cpu_only=self.is_cpu_only,
        )


class TraceSet(Mapping[int, Trace]):
    """Traces of several ranks of one job, by rank.

    ``missing_ranks``: those that the traces' world size tells of and that are not there. ``messages`` says which files of the folder were
    no traces, which ranks are missing, and where ranks disagree.
    """

    def __init__(
        self, traces: Mapping[int, Trace], *, path: Path | None = None, messages: tuple[str, ...] = ()
    ) -> None:
        self._traces = dict(sorted(traces.items()))
        self.path = path
        sizes = {t.world_size for t in self._traces.values() if t.world_size}
        self.missing_ranks = tuple(r for r in range(max(sizes, default=0)) if r not in self._traces)
        self.messages = (*messages, *self._disagreements(sizes))

    def _disagreements(self, sizes: set[int]) -> Iterator[str]:
        if self.missing_ranks:
            yield f"{len(self)} of {max(sizes)} ranks are here; missing: {', '.join(map(str, self.missing_ranks[:16]))}"
        if len(sizes) > 1:
            yield f"the ranks' traces tell of different world sizes: {', '.join(map(str, sorted(sizes)))}"
        steps = {r: len(t.step_windows) for r, t in self._traces.items()}
        if len(set(steps.values())) > 1:
            yield f"the ranks have different numbers of steps: {', '.join(f'rank {r} {n}' for r, n in steps.items())}"

    def __getitem__(self, rank: int) -> Trace:
        return self._traces[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    def __repr__(self) -> str:
        return f"TraceSet(ranks {list(self._traces)})"

    def steps(self) -> pd.DataFrame:
        """The steps of all ranks: rank before the columns of ``Trace.steps`` and, last, skew_us: host start after the earliest rank's
        of the same step. The hosts' clocks are taken as they are, so across machines skew holds their difference too."""
        tables = [t.steps().assign(rank=r) for r, t in self._traces.items()]
        rows = pd.concat(tables, ignore_index=True)
        earliest = rows.groupby("step")["host_start_ns"].transform("min") if len(rows) else rows["host_start_ns"]
        rows["skew_us"] = (rows["host_start_ns"] - earliest) / 1000
        return rows[["rank", *(c for c in rows if c != "rank")]]

    def across(self) -> pd.DataFrame:
        """One row a step that every rank has: step, period_us (the slowest rank's: a step over ranks is the maximum), period_mean_us,
        slowest_rank, skew_us (largest). Mind the first steps: a rank that began its capture early waits in its first collective."""
        rows = self.steps()
        whole = (
            rows.groupby("step").filter(lambda g: len(g) == len(self) and g["period_us"].notna().all())
            if len(rows)
            else rows
        )
        columns = ["step", "period_us", "period_mean_us", "slowest_rank", "skew_us"]
        if not len(whole):
            return pd.DataFrame({c: pd.Series(dtype=float if c.endswith("_us") else np.int64) for c in columns})
        by = whole.groupby("step")
        slowest = whole.loc[by["period_us"].idxmax()].set_index("step")["rank"]
        table = pd.DataFrame(
            {
                "period_us": by["period_us"].max(),
                "period_mean_us": by["period_us"].mean(),
                "slowest_rank": slowest,
                "skew_us": by["skew_us"].max(),
            }
        )
        return table.reset_index()[columns]
