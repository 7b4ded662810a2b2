"""The figures of a trace as one strict-JSON dict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dspark_lab.trace.model import Trace, TraceSet
from dspark_lab.trace.source import open_trace
from dspark_lab.trace.waits import KINDS

#: Medians leave the first two steps out where there are more: the first is cold and the second still drains it.
SKIPPED_STEPS = 2


def summarize(trace: Any) -> dict[str, Any]:
    """The figures of a trace, None where the trace does not bear them; of a set, ``{"ranks": {"0": {...}}, "missing_ranks", "messages"}``.

    Counts and totals are of the whole capture. ``_per_step`` are means over all steps, ``_p50`` medians over the steps from the
    third on (all where there are fewer than three). Host waits are withheld, kind by kind, where steps lost their device events:
    the host's own calls are then missing too, and which copies blocked is not known. ``waits`` holds a row for each call and site, ``memcpy`` one for each kind and
    size in bytes; waits outside the steps are in ``waits`` and in no step. ``integrity`` says what is withheld and why.
    """
    if not isinstance(trace, (Trace, Mapping)):
        trace = open_trace(trace)
    if isinstance(trace, Mapping):
        return {"ranks": {str(rank): summarize(one) for rank, one in trace.items()}} | _of_set(trace)
    steps = trace.steps()
    n, late = len(steps), steps[SKIPPED_STEPS:] if len(steps) > SKIPPED_STEPS else steps
    figures = {
        "num_steps": n,
        "profiled": trace.profiled,
        "step_us_p50": _median(late["period_us"]),
        "step_us_mean": _mean(steps["period_us"]),
        "gpu_span_us_per_step": _number(trace.device_span_us() / n) if n else None,
        "kernels_per_step": _number(steps["num_kernels"].mean()) if n else None,
        "launch_lead_us_p50": _median(late["launch_lead_us"].dropna()),
        "host_wait_us_per_step": {k: _number(steps[f"{k}_us"].mean()) if n else None for k in KINDS},
        "host_wait_us_p50": {k: _median(late[f"{k}_us"]) for k in KINDS},
        "waits": _waits(trace.waits()),
        "memcpy": _memcpy(trace.memcpy()),
        "integrity": trace.integrity.to_dict(),
    }
    return figures | {k: _none_like(figures.get(k)) for k in trace.integrity.withheld}


def integrity(source: Any) -> dict[str, Any]:
    """The integrity reports of a trace or of all ranks: ``{"ranks": {"0": {...}}, "missing_ranks", "messages", "problems"}``.

    ``problems`` is empty where every figure stands: nothing was mended, left out, withheld, and no rank is missing from a folder of ranks.
    """
    opened = open_trace(source)
    ranks = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
    told = _of_set(opened) if isinstance(opened, TraceSet) else {"missing_ranks": [], "messages": []}
    problems = [f"rank {rank}: {p}" for rank, one in ranks.items() for p in one.integrity.problems]
    if told["missing_ranks"]:
        problems.append(f"ranks {', '.join(map(str, told['missing_ranks']))} are missing")
    return {"ranks": {str(r): t.integrity.to_dict() for r, t in ranks.items()}, **told, "problems": problems}


def _of_set(traces: Mapping[int, Trace]) -> dict[str, Any]:
    if not isinstance(traces, TraceSet):
        return {}
    return {"missing_ranks": list(traces.missing_ranks), "messages": list(traces.messages)}


def _none_like(figure: Any) -> Any:
    """None in place of a figure, or of each of its kinds."""
    return dict.fromkeys(figure) if isinstance(figure, dict) else None


def _waits(waits: pd.DataFrame) -> list[dict[str, Any]]:
    if not len(waits):
        return []
    by = waits.groupby(["name", "kind", "site"], sort=False)["dur_us"]
    rows = [
        {"name": name, "kind": kind, "site": site, "count": len(durs), "total_us": _number(durs.sum())}
        for (name, kind, site), durs in by
    ]  # pyright: ignore[reportGeneralTypeIssues]
    return sorted(rows, key=lambda r: -(r["total_us"] or 0))


def _memcpy(copies: pd.DataFrame) -> list[dict[str, Any]]:
    if not len(copies):
        return []
    by = copies.groupby(["kind", "bytes"], sort=True).size()
    return [{"kind": kind, "bytes": int(size), "count": int(count)} for (kind, size), count in by.items()]  # pyright: ignore[reportGeneralTypeIssues]


def _median(values: pd.Series) -> float | None:
    """Median, None where a value is missing: a median over the steps that happen to be whole is none over the steps."""
    return None if not len(values) or values.isna().any() else _number(values.median())


def _mean(values: pd.Series) -> float | None:
    return None if not len(values) or values.isna().any() else _number(values.mean())


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 3) if math.isfinite(number) else None
