"""What stands before and inside a graph replay that the batch did not ask for: kernels launched just before it, rows it was padded by."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from dspark_lab.trace import Trace
from dspark_lab.trace.events import in_categories

PRE_COLUMNS = ("num_pre_kernels", "pre_kernels_us", "pre_kernels")
PADDING_COLUMNS = ("batch", "captured_batch", "captured_source")
#: The batch that a step's label tells: SGLang's ``step[DECODE bs=5]``, vLLM's ``execute_…_generation_5(5)``.
_BATCH = re.compile(r"\bbs=(\d{1,9})|generation_(\d{1,9})")
#: The batch that a graph was captured for, where a range around its launch tells it: ``cuda_graph bs=8``, ``padded batch_size: 8``.
_CAPTURED = re.compile(
    r"(?:graph|padded|captured)[^=:]{0,24}?(?:bs|batch|batch_size|size|num_tokens)\s*[=:]\s*(\d{1,9})", re.IGNORECASE
)


def pre_kernels(trace: Trace) -> pd.DataFrame:
    """One row a graph launch call (index: row of ``trace.linked.calls``): kernels that its thread launched singly in the same step since the
    graph launch before. Columns: num_pre_kernels, pre_kernels_us (their time on the device), pre_kernels (names with counts)."""
    calls, device = trace.linked.calls, trace.linked.device
    graphs = np.flatnonzero(calls["is_graph"].to_numpy())
    out = pd.DataFrame({"num_pre_kernels": 0, "pre_kernels_us": 0.0, "pre_kernels": ""}, index=graphs)
    own = np.flatnonzero((device["category"] == "kernel").to_numpy() & (device["call"].to_numpy() >= 0))
    call = device["call"].to_numpy()[own]
    single = ~calls["is_graph"].to_numpy()[call]
    own, call = own[single], call[single]
    tid, place = calls["tid"].to_numpy(), calls["place"].to_numpy()
    target = np.full(len(own), -1)
    for thread in np.unique(tid[graphs]):
        mine = graphs[tid[graphs] == thread]
        at = np.searchsorted(mine, call)
        follows = (at < len(mine)) & (tid[call] == thread)
        target[follows] = mine[at[follows]]
    kept = (target >= 0) & (place[np.maximum(target, 0)] == place[call])
    rows = pd.DataFrame(
        {
            "graph": target[kept],
            "name": device["name"].cat.codes.to_numpy()[own[kept]],
            "us": (trace.sound_ends_ns[own[kept]] - device["ts_ns"].to_numpy()[own[kept]]) / 1000,
        }
    )
    names = device["name"].cat.categories
    for graph, group in rows.groupby("graph"):
        counts = group["name"].value_counts(sort=False)
        said = ", ".join(f"{n} × {names[int(c)]}" if n > 1 else str(names[int(c)]) for c, n in counts.items())  # pyright: ignore[reportArgumentType]
        out.loc[graph] = [len(group), float(group["us"].sum()), said]  # pyright: ignore[reportCallIssue, reportArgumentType]
    return out


def batches(trace: Trace, launches: pd.DataFrame) -> pd.DataFrame:
    """The batch of each replay and what its graph was captured for, −1 where nothing tells.

    Columns: batch (of the step's label); captured_batch; captured_source: ``annotation`` (a range around the launch tells it), ``at least``
    (the largest batch that this graph replayed in the trace: a lower bound), "".

    Args:
        launches: graph, step, ts_ns of each replay.
    """
    windows = trace.step_windows
    told = {int(label): _number(_BATCH, name) for label, name in zip(windows.labels, windows.names, strict=True)}
    batch = np.array([told.get(int(s), -1) for s in launches["step"]], dtype=np.int64)
    marks = trace.events[in_categories(trace.events, ("user_annotation", "cpu_op"))]
    sizes = np.array([_number(_CAPTURED, str(n)) for n in marks["name"].cat.categories], dtype=np.int64)
    size = sizes[marks["name"].cat.codes.to_numpy()] if len(marks) else np.empty(0, dtype=np.int64)
    start = marks["ts_ns"].to_numpy()[size >= 0]
    end, size = start + marks["dur_ns"].to_numpy()[size >= 0], size[size >= 0]
    captured = np.full(len(launches), -1)
    for k, ts in enumerate(launches["ts_ns"].tolist()) if len(size) else ():
        around = np.flatnonzero((start <= ts) & (ts < end))
        if len(around):
            captured[k] = size[around[-1]]
    source = np.where(captured >= 0, "annotation", "").astype(object)
    largest = (
        pd.Series(batch).groupby(launches["graph"].to_numpy()).transform("max").to_numpy() if len(launches) else batch
    )
    guess = (captured < 0) & (batch >= 0)
    captured, source[guess] = np.where(guess, largest, captured), "at least"
    return pd.DataFrame({"batch": batch, "captured_batch": captured, "captured_source": source}, index=launches.index)


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return int(next(g for g in found.groups() if g)) if found else -1
