"""Every step of a trace as one row: its period, where it went, how far the host was ahead, where it waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.breakdown import PARTS, breakdown
from dspark_lab.trace import TraceSet, open_trace

COLUMNS = (
    "rank", "step", "name", "period_us", *(f"{p}_us" for p in PARTS), "communication_total_us", "num_kernels", "launch_lead_us", "sync_us",
    "event_wait_us", "blocking_copy_us", "gpu_span_us", "host_start_ns", "host_end_ns", "device_start_ns", "withheld", "profiled",
)  # fmt: skip


def step_parts(source: Any, *, comm_patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """One row a step of each rank, µs of profiled time: the tables of ``Trace.steps`` and `breakdown` side by side.

    Columns: ``COLUMNS``. The parts sum to period_us; where they are withheld they are NaN and ``withheld`` says why. A period is NaN where
    the step has none on the device.
    """
    opened = open_trace(source)
    traces = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
    parts = breakdown(opened, comm_patterns=comm_patterns)
    tables = []
    for rank, trace in traces.items():
        steps = trace.steps().assign(rank=rank)
        own = parts[(parts["rank"] == rank).to_numpy()].reset_index(drop=True)  # one row a step, in the same order
        for part in (*PARTS, "communication_total"):
            ns = own[f"{part}_ns"].to_numpy()
            steps[f"{part}_us"] = np.where(ns >= 0, ns / 1000, np.nan)
        tables.append(steps.assign(withheld=own["withheld"].to_numpy(dtype=object)))
    return pd.concat(tables, ignore_index=True)[list(COLUMNS)]
