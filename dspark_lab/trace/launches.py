"""Which host call put which events on the device, and how far ahead it was."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.trace.events import DEVICE_CATEGORIES, RUNTIME_CATEGORIES, in_categories, named
from dspark_lab.trace.polls import Runs, poll_runs
from dspark_lab.trace.steps import StepWindows

_LAUNCH = r"Launch.*Kernel|LaunchKernel|GraphLaunch|KernelLaunch"
_DEVICE_COLUMNS = (
    "category",
    "name",
    "ts_ns",
    "dur_ns",
    "pid",
    "stream",
    "device",
    "correlation",
    "bytes",
    "graph_id",
    "graph_node_id",
)
_CALL_COLUMNS = ("category", "name", "ts_ns", "dur_ns", "pid", "tid", "correlation")
_GRAPH_LAUNCH = r"GraphLaunch"


@dataclass(frozen=True, kw_only=True)
class Linked:
    """Runtime calls and device events of a trace, each with the step it belongs to.

    ``calls``: category, name, ts_ns, dur_ns, pid, tid, correlation, ``end_ns``, ``place`` (position of the step holding the call's start, −1 outside),
    ``is_launch``, ``is_graph``. ``device``: the device's columns with ``end_ns``, ``call`` (row of ``calls`` that launched it, −1 unknown), ``place`` (the step
    of that call). ``by_time`` says that there are no runtime calls and steps were assigned by the device's clock.
    """

    calls: pd.DataFrame
    device: pd.DataFrame
    by_time: bool

    @cached_property
    def polls(self) -> Runs:
        """Waits by polling among ``calls``."""
        return poll_runs(self.calls)


def link(events: pd.DataFrame, steps: StepWindows) -> Linked:
    """Join device events to the calls that launched them, by correlation id; External ids are not used, they differ."""
    on_host = np.flatnonzero(in_categories(events, RUNTIME_CATEGORIES))
    calls = pd.DataFrame({c: _wide(events[c].iloc[on_host]) for c in _CALL_COLUMNS}, copy=False)
    calls["end_ns"] = calls["ts_ns"] + calls["dur_ns"]
    calls["place"] = steps.of(calls["ts_ns"].to_numpy())
    calls["is_launch"] = named(calls, _LAUNCH)
    calls["is_graph"] = named(calls, _GRAPH_LAUNCH)
    on_device = np.flatnonzero(in_categories(events, DEVICE_CATEGORIES))
    device = pd.DataFrame({c: _wide(events[c].iloc[on_device]) for c in _DEVICE_COLUMNS}, copy=False)
    device["end_ns"] = device["ts_ns"] + device["dur_ns"]
    call = _first_call(calls["correlation"].to_numpy(), device["correlation"].to_numpy())
    device["call"] = call
    places = calls["place"].to_numpy()
    by_time = not len(calls) and len(device) > 0
    if by_time:
        device["place"] = _device_windows(events, steps).of(device["ts_ns"].to_numpy())
    else:
        device["place"] = np.where(call >= 0, places[call], -1) if len(places) else np.full(len(device), -1)
    return Linked(calls=calls, device=device, by_time=by_time)


def _wide(column: pd.Series) -> Any:
    """Values of a column, whole numbers in 64 bits: those who work with these tables reckon with them."""
    return (
        column.array
        if isinstance(column.dtype, pd.CategoricalDtype)
        else column.to_numpy().astype(np.int64, copy=False)
    )


def _first_call(of_calls: np.ndarray, of_device: np.ndarray) -> np.ndarray:
    """Row of the first call with each device event's correlation id, −1 where there is none."""
    ids, rows = np.unique(of_calls, return_index=True)
    known = ids >= 0
    ids, rows = ids[known], rows[known]
    if not len(ids):
        return np.full(len(of_device), -1)
    at = np.minimum(np.searchsorted(ids, of_device), len(ids) - 1)
    return np.where(ids[at] == of_device, rows[at], -1)


def _device_windows(events: pd.DataFrame, steps: StepWindows) -> StepWindows:
    """The steps' ranges on the device where it has annotations of the same names, else the host's."""
    marks = events[in_categories(events, ("gpu_user_annotation",))]
    marks = marks[marks["name"].astype(str).isin(steps.names)].drop_duplicates("name")
    if len(marks) != len(steps) or len(set(steps.names)) != len(steps):
        return steps
    order = marks.set_index(marks["name"].astype(str)).loc[list(steps.names)]
    start = order["ts_ns"].to_numpy()
    return StepWindows(
        labels=steps.labels,
        names=steps.names,
        start_ns=start,
        end_ns=start + order["dur_ns"].to_numpy(),
        source=steps.source,
    )


NONE = np.iinfo(np.int64).min


def first_at(place: np.ndarray, ns: np.ndarray, size: int) -> np.ndarray:
    """Least time at each position 0..size−1 (int64; ``NONE`` where there is none). Doubles would lose 256 ns at epoch size."""
    out = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(out, place, ns)
    return np.where(out == np.iinfo(np.int64).max, NONE, out)


def last_at(place: np.ndarray, ns: np.ndarray, size: int) -> np.ndarray:
    """Greatest time at each position 0..size−1, ``NONE`` where there is none."""
    out = np.full(size, NONE)
    np.maximum.at(out, place, ns)
    return out


def us_between(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """end − start in µs as doubles, NaN where either is ``NONE``."""
    known = (start_ns != NONE) & (end_ns != NONE)
    return np.where(known, (np.where(known, end_ns, 0) - np.where(known, start_ns, 0)) / 1000, np.nan)


def or_minus_one(ns: np.ndarray) -> np.ndarray:
    """−1 in place of ``NONE``, as tables show it."""
    return np.where(ns == NONE, -1, ns)


def launches(linked: Linked, steps: StepWindows) -> pd.DataFrame:
    """One row a launch call (kernel or graph), in order of time: what it put on the device and its lead.

    ``device_start_ns`` is of its first kernel (first event where it has no kernel), −1 without events.
    ``lead_us`` is that start minus the end of the call, NaN without events.
    """
    calls, device, n = linked.calls, linked.device, len(linked.calls)
    rows = np.flatnonzero(calls["is_launch"].to_numpy() | calls["is_graph"].to_numpy())
    of = {
        c: calls[c].to_numpy()[rows] for c in ("place", "is_graph", "ts_ns", "dur_ns", "end_ns", "tid", "correlation")
    }
    own = np.flatnonzero(device["call"].to_numpy() >= 0)
    at, start, end = (device[c].to_numpy()[own] for c in ("call", "ts_ns", "end_ns"))
    kernel = (device["category"] == "kernel").to_numpy()[own]
    first, first_kernel = first_at(at, start, n), first_at(at[kernel], start[kernel], n)
    anchor = np.where(first_kernel == NONE, first, first_kernel)[rows]
    graph_id = np.full(n, -1)
    graph_id[at] = device["graph_id"].to_numpy()[own]
    names = calls["name"].cat.categories.to_numpy(dtype=object)
    return pd.DataFrame(
        {
            "step": steps.label(of["place"]),
            "name": names[calls["name"].cat.codes.to_numpy()[rows]],
            "is_graph": of["is_graph"],
            "ts_ns": of["ts_ns"],
            "dur_us": of["dur_ns"] / 1000,
            "tid": of["tid"],
            "correlation": of["correlation"],
            "graph_id": graph_id[rows],
            "num_kernels": np.bincount(at[kernel], minlength=n)[rows],
            "num_device_events": np.bincount(at, minlength=n)[rows],
            "device_start_ns": or_minus_one(anchor),
            "device_end_ns": or_minus_one(last_at(at, end, n)[rows]),
            "lead_us": us_between(of["end_ns"], anchor),
        },
        copy=False,
    )
