"""`matched_profile`: the seed's experiment for any config. The same steps, unprofiled and profiled, one arm beside the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from dspark_lab.analysis.latency import compare
from dspark_lab.config import LabConfig
from dspark_lab.runs.plan import is_floor
from dspark_lab.runs.record import Run
from dspark_lab.runs.runner import sweep
from dspark_lab.runs.spec import Progress
from dspark_lab.trace import Trace, TraceSet, open_trace

SEED_ARMS = ("none", "blocking", "non_blocking", "on_demand")
"""Before the regression, sglang #33465, #34782 alone, #34759."""


@dataclass(frozen=True, kw_only=True)
class MatchedProfile:
    """The experiment's table, with what it was made of."""

    table: pd.DataFrame
    """A row an arm; see `profile_table`."""
    runs: list[Run]
    kernels: dict[str, Any] = field(default_factory=dict)
    """By baseline: ``equal`` (kernels inside graphs are the same in all its arms) and ``outside`` (by arm, kernels a step
    outside graphs)."""

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, float_format=lambda x: f"{x:.3f}", na_rep="–")


def matched_profile(
    cfg: LabConfig,
    arms: Sequence[str] = SEED_ARMS,
    *,
    steps: int = 128,
    processes: int = 5,
    repeats: int = 2,
    floor: bool | None = None,
    out: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> MatchedProfile:
    """Unprofiled blocks in ``processes`` processes (order counterbalanced), then one profiled capture of ``steps`` an arm.

    ``floor`` adds the arm with the mask off and nothing built; by default where the scalar is consumed (EP above 1).
    """
    with_floor = cfg.parallel.ep_size > 1 if floor is None else floor
    allocs = [a for a in arms if not (a == "none" and cfg.needs_scalar)]
    runs = sweep(
        cfg.replace(alloc=allocs[0]),
        alloc=allocs,
        num_steps=steps,
        repeats=repeats,
        processes=processes,
        profile_steps=steps,
        profile_processes=1,
        floor=with_floor,
        out=out,
        on_progress=on_progress,
    )
    return from_runs(runs)


def from_runs(runs: Sequence[Run]) -> MatchedProfile:
    """The same table of runs that are there already, recorded ones say."""
    table = profile_table(runs)
    captured: dict[str, dict[str, Trace]] = {}
    for run in runs:
        if run.role == "arm" and run.trace_paths and not run.same_path_as:
            base = table.loc[table["name"] == run.name, "baseline"].iloc[0]
            captured.setdefault(base, {})[run.name] = _first(open_trace(run))
    return MatchedProfile(
        table=table, runs=list(runs), kernels={base: _kernels(traces) for base, traces in captured.items()}
    )


def profile_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row an arm: unprofiled step with delta, interval, floor and verdict; the profiled period and its delta; the factor by
    which profiling inflated the delta; launch lead, waits a step by kind, host µs of the scalar alone, lost µs against the
    baseline; mean and maximum over ranks; clocks and power. All times of profiled columns come from the captures."""
    table = compare(runs)
    by_name = {r.name: r for r in runs}
    rows = [_arm(by_name[row["name"]], row) for row in cast("list[dict[str, Any]]", table.to_dict("records"))]
    at = {r["name"]: r for r in rows}
    for r in rows:
        base = at[r["baseline"]]
        r["profiled_delta_pct"] = 100.0 * (r["profiled_step_us_p50"] / base["profiled_step_us_p50"] - 1.0)
        r["inflation"] = r["profiled_delta_pct"] / r["delta_pct"] if r["verdict"] == "slower" else np.nan
        r["lost_us"] = 1e3 * (r["step_ms_p50"] - base["step_ms_p50"])
    return pd.DataFrame(rows)


def _arm(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    unprofiled = run.step_us()
    clocks = pd.DataFrame(run.outputs.get("clocks", []))
    return {
        "arm": row["alloc"] + (" (mask off)" if is_floor(run.config) else ""),
        "name": row["name"],
        "baseline": row["baseline"],
        "ep_size": row["ep_size"],
        "tp_size": row["tp_size"],
        "batch_size": row["batch_size"],
        "same_path_as": row["same_path_as"],
        "step_ms_p50": row["step_ms_p50"],
        "step_ms_mean_ranks": float(unprofiled["step_us_mean_ranks"].median()) / 1e3 if len(unprofiled) else np.nan,
        "delta_pct": row["delta_pct"],
        "delta_pct_ci95": row["delta_pct_ci95"],
        "floor_pct": row["floor_pct"],
        "verdict": row["verdict"],
        **_captured(run),
        "scalar_host_us_p50": run.outputs.get("host", {}).get("scalar_us_p50", np.nan),
        "accept_length": row["accept_length"],
        "sm_clock": _median_number(clocks, "clocks.sm"),
        "power_w": _median_number(clocks, "power.draw"),
        "label": row["label"],
    }


def _captured(run: Run) -> dict[str, float]:
    """Medians over steps from the third on of the captures, mean and maximum over ranks."""
    names = {"profiled_step_us_p50": "period_us", "launch_lead_us_p50": "launch_lead_us", "sync_us_p50": "sync_us",
             "event_wait_us_p50": "event_wait_us", "blocking_copy_us_p50": "blocking_copy_us"}  # fmt: skip
    if not run.trace_paths:
        return dict.fromkeys([*names, "profiled_step_us_p50_max"], np.nan)
    per_rank = [t.steps().iloc[2:] for t in _ranks(open_trace(run))]
    medians = {name: [float(s[column].median()) for s in per_rank] for name, column in names.items()}
    out = {name: float(np.mean(values)) for name, values in medians.items()}
    return out | {"profiled_step_us_p50_max": float(np.max(medians["profiled_step_us_p50"]))}


def _ranks(opened: Trace | TraceSet) -> list[Trace]:
    return list(opened.values()) if isinstance(opened, TraceSet) else [opened]


def _first(opened: Trace | TraceSet) -> Trace:
    return _ranks(opened)[0]


def _kernels(captured: dict[str, Trace]) -> dict[str, Any]:
    inside: dict[str, Counter[str]] = {}
    outside: dict[str, dict[str, float]] = {}
    for name, trace in captured.items():
        kernels, n = trace.kernels(), max(len(trace.steps()), 1)
        kernels = kernels[kernels["step"] >= 0]
        graph = kernels["in_graph"].astype(bool)
        inside[name] = Counter(kernels.loc[graph, "name"].astype(str))
        rest = Counter(kernels.loc[~graph, "name"].astype(str))
        outside[name] = {k: v / n for k, v in rest.most_common()}
    counts = list(inside.values())
    return {"equal": all(c == counts[0] for c in counts), "outside": outside}


def _median_number(table: pd.DataFrame, column: str) -> float:
    if column not in table:
        return float("nan")
    return float(pd.to_numeric(table[column].str.extract(r"([\d.]+)")[0], errors="coerce").median())
