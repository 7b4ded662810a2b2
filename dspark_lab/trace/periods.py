"""The table of steps: periods, leads, waits."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dspark_lab.trace.launches import NONE, Linked, first_at, last_at, or_minus_one, us_between
from dspark_lab.trace.steps import StepWindows
from dspark_lab.trace.waits import KINDS

COLUMNS = (
    "step", "name", "host_start_ns", "host_end_ns", "device_start_ns", "period_us", "num_kernels", "launch_lead_us",
    "sync_us", "event_wait_us", "blocking_copy_us", "gpu_span_us", "profiled",
)  # fmt: skip


def step_table(
    linked: Linked,
    steps: StepWindows,
    launch_rows: pd.DataFrame,
    waits: pd.DataFrame,
    *,
    profiled: bool,
    cpu_only: bool,
) -> pd.DataFrame:
    """One row a step.

    Columns: step (its number), name, host_start_ns, host_end_ns, device_start_ns (−1 without device events), period_us,
    num_kernels, launch_lead_us, sync_us, event_wait_us, blocking_copy_us (host time, µs), gpu_span_us (first to last device
    event of the step), profiled. Without any device the period is the host's wall time of the step and lead and span are NaN.
    """
    n, device = len(steps), linked.device
    inside = device["place"].to_numpy() >= 0
    place = device["place"].to_numpy()[inside]
    start, end = device["ts_ns"].to_numpy()[inside], sound_ends(device)[inside]
    first, last = first_at(place, start, n), last_at(place, end, n)
    kernel = (device["category"] == "kernel").to_numpy()[inside]
    following = np.append(first[1:], NONE)
    period = np.where(steps.follows(), us_between(first, following), us_between(first, last))
    if cpu_only:
        period = (steps.end_ns - steps.start_ns) / 1000
    table = {
        "step": steps.labels.astype(np.int64),
        "name": np.array(steps.names, dtype=object),
        "host_start_ns": steps.start_ns,
        "host_end_ns": steps.end_ns,
        "device_start_ns": or_minus_one(first),
        "period_us": period.astype(float),
        "num_kernels": np.bincount(place[kernel], minlength=n),
        "launch_lead_us": _leads(launch_rows, steps),
        **{f"{kind}_us": _per_step(waits[(waits["kind"] == kind).to_numpy()], steps) for kind in KINDS},
        "gpu_span_us": us_between(first, last),
        "profiled": np.full(n, profiled),
    }
    return pd.DataFrame(table)[list(COLUMNS)]


def sound_ends(device: pd.DataFrame) -> np.ndarray:
    """End of each device event in ns; one that swallows the whole of the next event of its stream is cut at that one's start."""
    end = device["end_ns"].to_numpy()
    swallows, cut = overruns(device)
    return np.where(swallows, cut, end)


def overruns(device: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """(which events outlast the whole of the next one on their stream, start of that next one). Kernels that merely overlap are
    let be: a graph's parallel branches and dependent launches do so by a fraction of a microsecond."""
    start, end = device["ts_ns"].to_numpy(), device["end_ns"].to_numpy()
    order = np.lexsort((start, device["stream"].to_numpy(), device["device"].to_numpy(), device["pid"].to_numpy()))
    same = np.zeros(len(device), dtype=bool)
    following, next_end = start.copy(), end.copy()
    if len(device) > 1:
        a, b = order[:-1], order[1:]
        same[a] = (device["stream"].to_numpy()[a] == device["stream"].to_numpy()[b]) & (
            device["pid"].to_numpy()[a] == device["pid"].to_numpy()[b]
        )
        following[a], next_end[a] = start[b], end[b]
    swallows = same & (device["stream"].to_numpy() >= 0) & (end > next_end) & (following > start)
    return swallows, following


def _leads(launch_rows: pd.DataFrame, steps: StepWindows) -> np.ndarray:
    """Lead of each step's first graph launch, of its first launch where it has no graph; NaN where that has no device event."""
    out = np.full(len(steps), np.nan)
    inside = launch_rows[(launch_rows["step"] >= 0).to_numpy()]
    graphs = inside[inside["is_graph"].to_numpy()].drop_duplicates("step")
    eager = (
        inside[inside["num_kernels"].to_numpy() > 0]
        .sort_values("device_start_ns", kind="stable")
        .drop_duplicates("step")
    )
    place = {int(label): i for i, label in enumerate(steps.labels)}
    for rows in (eager, graphs):
        for step, lead in zip(rows["step"], rows["lead_us"], strict=True):
            out[place[int(step)]] = lead
    return out


def _per_step(waits: pd.DataFrame, steps: StepWindows) -> np.ndarray:
    total = waits.groupby("step")["dur_us"].sum() if len(waits) else pd.Series(dtype=float)
    return np.array([float(total.get(int(label), 0.0)) for label in steps.labels])
