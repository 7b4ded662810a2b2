"""Boxes for pictures of a trace: device and host events with a colour each, phases as spans, gaps."""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import comm_labels
from dspark_lab.view.rows import records

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|deep_?ep|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|gloo|c10d::", re.IGNORECASE
)
PHASES = ("draft", "verify", "accept")
MAX_NAME = 64


def short(name: str) -> str:
    """A kernel's name without namespaces and template arguments, at most 64 characters; of a mangled one its namespaces and name."""
    name = re.sub(r"^void ", "", str(name))
    if name.startswith("_ZN"):
        return _mangled(name)
    head = name.split("<", 1)[0].split("(", 1)[0]
    head = head.rsplit("::", 1)[-1] or name
    return head if len(head) <= MAX_NAME else head[: MAX_NAME - 1] + "…"


def _mangled(name: str) -> str:
    """The identifiers that a mangled name (Itanium ABI) begins with: ``_ZN7cutlass13device_kernelI…`` is cutlass::device_kernel."""
    at, parts = 3, []
    while found := re.match(r"(\d+)", name[at:]):
        at += found.end()
        parts.append(name[at : at + int(found[1])])
        at += int(found[1])
    return "::".join(parts)[:MAX_NAME] or name[:MAX_NAME]


_of_trace: WeakKeyDictionary[Any, dict[str, pd.DataFrame]] = WeakKeyDictionary()


def device_work(trace: Any) -> pd.DataFrame:
    """`device_boxes` of a whole trace, made once."""
    kept = _of_trace.setdefault(trace, {})
    if "work" not in kept:
        kept["work"] = device_boxes(trace.events)
    return kept["work"]


def device_boxes(events: pd.DataFrame) -> pd.DataFrame:
    """Device events: start_ns, dur_ns, stream, device, correlation, name, colour (compute, communication or copy), sorted."""
    rows = events[events["category"].isin(DEVICE)]
    names = rows["name"].astype(str)
    talks = comm_labels(rows["name"]) != ""
    colour = np.where(rows["category"] == "kernel", np.where(talks, "communication", "compute"), "copy")
    shorts = {n: short(n) for n in names.unique()}
    return pd.DataFrame(
        {
            "start_ns": rows["ts_ns"].to_numpy(),
            "dur_ns": rows["dur_ns"].to_numpy(),
            "stream": rows["stream"].to_numpy(),
            "device": rows["device"].to_numpy(),
            "correlation": rows["correlation"].to_numpy(),
            "name": names.map(shorts).to_numpy(),
            "colour": colour,
        }
    ).sort_values("start_ns", ignore_index=True)


def op_boxes(events: pd.DataFrame) -> pd.DataFrame:
    """Ops of a trace without a device that are not nested in another: start_ns, dur_ns, tid, name, colour, in the order of the file."""
    ops = events[events["category"] == "cpu_op"]
    ends = ops["ts_ns"] + ops["dur_ns"]
    before = ends.groupby(ops["tid"]).transform(lambda x: x.cummax().shift(1)).to_numpy()
    ops = ops[~(ops["ts_ns"].to_numpy() < np.nan_to_num(before, nan=-np.inf))]
    names = ops["name"].astype(str)
    talk = names.str.contains(COMMUNICATION).to_numpy(dtype=bool)
    return pd.DataFrame(
        {
            "start_ns": ops["ts_ns"].to_numpy(),
            "dur_ns": ops["dur_ns"].to_numpy(),
            "tid": ops["tid"].to_numpy(),
            "name": names.map(short).to_numpy(),
            "colour": np.where(talk, "communication", "compute"),
        }
    )


def phase_spans(trace: Any) -> pd.DataFrame:
    """Draft, verify and accept of each step: step, phase, host_start_ns, host_end_ns, device_start_ns, device_end_ns (−1: none).

    From the trace's own phases; where it has none, from the order of graph launches: the first of a step drafts, the last verifies.
    """
    kept = _of_trace.setdefault(trace, {})
    if "spans" not in kept:
        named = _named_phases(trace)
        kept["spans"] = _with_device(named, trace) if len(named) else _by_launch_order(trace)
    return kept["spans"]


SPAN_COLUMNS = ["step", "phase", "host_start_ns", "host_end_ns", "device_start_ns", "device_end_ns"]


def _named_phases(trace: Any) -> pd.DataFrame:
    rows = trace.phases()
    if not len(rows):
        return pd.DataFrame(columns=SPAN_COLUMNS)
    name = rows["phase" if "phase" in rows else "name"].astype(str).str.rsplit("::").str[-1]
    known = name.isin(PHASES)
    rows, name = rows[known], name[known]
    start = rows["ts_ns"].to_numpy()
    end = start + np.rint(rows["dur_us"].to_numpy() * 1e3).astype("int64")
    found = {"step": rows["step"].to_numpy(), "phase": name.to_numpy(), "host_start_ns": start, "host_end_ns": end}
    return pd.DataFrame(found).assign(device_start_ns=-1, device_end_ns=-1)


def _by_launch_order(trace: Any) -> pd.DataFrame:
    rows = trace.launches()
    rows = rows[rows["is_graph"] & (rows["step"] >= 0)]
    from_end = rows.groupby("step").cumcount(ascending=False)
    several = rows.groupby("step")["step"].transform("size") > 1
    start = rows["ts_ns"].to_numpy()
    end = start + np.rint(rows["dur_us"].to_numpy() * 1e3).astype("int64")
    return pd.DataFrame(
        {
            "step": rows["step"].to_numpy(),
            "phase": np.where((from_end == 0) & several, "verify", "draft"),
            "host_start_ns": start,
            "host_end_ns": end,
            "device_start_ns": rows["device_start_ns"].to_numpy(),
            "device_end_ns": rows["device_end_ns"].to_numpy(),
        },
        columns=SPAN_COLUMNS,
    )


def _with_device(spans: pd.DataFrame, trace: Any) -> pd.DataFrame:
    """Adds first start and last end of the device events whose launches lie within each span."""
    rows = trace.launches()
    rows = rows[rows["device_start_ns"] > 0]
    at, first, last = (rows[c].to_numpy() for c in ("ts_ns", "device_start_ns", "device_end_ns"))
    spans = spans.reset_index(drop=True)
    for i, s in enumerate(records(spans)):
        mine = (at >= s["host_start_ns"]) & (at <= s["host_end_ns"])
        if mine.any():
            spans.loc[i, "device_start_ns"], spans.loc[i, "device_end_ns"] = (
                int(first[mine].min()),
                int(last[mine].max()),
            )
    return spans


def gaps(boxes: pd.DataFrame, lo: int, hi: int, *, over_ns: float) -> list[tuple[int, int]]:
    """(start, end) of the times within lo..hi in which no device event ran for longer than ``over_ns``."""
    inside = boxes[(boxes["start_ns"] < hi) & (boxes["start_ns"] + boxes["dur_ns"] > lo)]
    if not len(inside):
        return []
    start = inside["start_ns"].to_numpy()
    reach = np.maximum.accumulate((inside["start_ns"] + inside["dur_ns"]).to_numpy())
    idle = start[1:] - reach[:-1]
    return [(int(reach[i]), int(start[i + 1])) for i in np.flatnonzero(idle > over_ns)]
