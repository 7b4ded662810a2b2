"""What expert parallelism cost, out of runs: times and bytes by rank, load by layer and expert, imbalance and its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from dspark_lab.errors import LabError
from dspark_lab.plan.balance import lower_bound
from dspark_lab.plan.load import Imbalance
from dspark_lab.runs.record import Run, as_runs, real_share

COLUMNS = (
    "name", "ep_size", "attn_dp", "dispatcher", "placement", "batch_size", "rank", "step_ms_p50", "wait_us", "dispatch_us", "experts_us",
    "combine_us", "bytes_a_step", "rows_a_step", "real_share", "imbalance", "bound", "label",
)  # fmt: skip


def ep_table(runs: Run | Sequence[Run]) -> pd.DataFrame:
    """A row a run and rank.

    ``step_ms_p50``: median unprofiled step of this rank. ``wait_us`` … ``combine_us``: a step, summed over layers, counted
    apart from those: eagerly, each exchange behind a meeting of all ranks, so that waiting for the slowest is told from the
    exchange itself. ``bytes_a_step`` sent to other ranks; ``rows_a_step`` computed by this rank's experts (a row at k of them
    counts k times); ``real_share``: real rows over padded ones. ``imbalance``: `imbalance_of` the target, with its ``bound``.
    """
    rows = []
    for run in as_runs(runs):
        if run.role != "arm":
            continue
        p, e = run.config.parallel, run.config.engine
        even = imbalance_of(run)
        for part in sorted(run.ep, key=lambda d: d["rank"]):
            steps = max(part.get("num_steps", 0), 1)
            us = part.get("exchange", {}).get("us_a_step", {})
            rows.append(
                {
                    "name": run.name, "ep_size": p.ep_size, "attn_dp": p.attn_dp,
                    "dispatcher": p.dispatcher if p.ep_size > 1 else "local", "placement": p.placement,
                    "batch_size": e.batch_size, "rank": part["rank"], "step_ms_p50": _step_ms(run, part["rank"]),
                    **{f"{kind}_us": us.get(kind, math.nan) for kind in ("wait", "dispatch", "experts", "combine")},
                    "bytes_a_step": part.get("bytes_sent", 0) / steps, "rows_a_step": part.get("rows_computed", 0) / steps,
                    "real_share": real_share(part),
                    "imbalance": even.mean if even else math.nan, "bound": even.bound if even else math.nan,
                    "label": run.label,
                }
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def expert_load(run: Run, who: str = "target") -> np.ndarray:
    """[MoE layers, num_experts] rows of each logical expert over all ranks, copies added up.

    Raises `LabError` for a run that counted none.
    """
    parts = [d[who] for d in run.ep if who in d and "experts" in d[who]]
    if not parts:
        raise LabError(f"{run.name} holds no expert load of the {who}; measure it with lab.sweep, which counts it.")
    c = run.config.model.target if who == "target" else run.config.model.draft
    load = np.zeros((len(parts[0]["rows"]), c.num_experts))
    for part in parts:
        for layer, (experts, rows) in enumerate(zip(part["experts"], part["rows"], strict=True)):
            np.add.at(load[layer], experts, rows)
    return load


def rows_by_rank(run: Run, who: str = "target") -> np.ndarray:
    """[MoE layers, ranks] rows that each rank's experts computed."""
    parts = [d[who]["rows"] for d in sorted(run.ep, key=lambda d: d["rank"]) if who in d]
    return np.array([[sum(layer) for layer in part] for part in parts]).T


def imbalance_of(run: Run, who: str = "target") -> Imbalance | None:
    """Measured: rows of the busiest rank over the mean, in each layer, then averaged; None at EP1 and without counts."""
    p = run.config.parallel
    if p.ep_size == 1 or not run.ep or who not in run.ep[0] or "experts" not in run.ep[0][who]:
        return None
    ranks, load = rows_by_rank(run, who), expert_load(run, who)
    means = ranks.mean(axis=1)
    ratios = np.divide(ranks.max(axis=1), means, out=np.ones_like(means), where=means > 0)
    redundant = p.num_redundant_experts
    # Copies share rows in turn, so a layer may come out better than the bound of even shares by a row or two.
    bounds = [lower_bound(row, p.ep_size, redundant) / (row.sum() / p.ep_size or 1.0) for row in load]
    return Imbalance(by_layer=tuple(map(float, ratios)), bound_by_layer=tuple(map(float, bounds)))


def traffic_of(run: Run, who: str = "target") -> np.ndarray | None:
    """[ranks, ranks] rows that rank i sent to rank j, over all layers; None where every rank gets the same."""
    parts = [d[who].get("rows_to") for d in sorted(run.ep, key=lambda d: d["rank"]) if who in d]
    if not parts or not all(parts):
        return None
    return np.array([np.sum(part, axis=0) for part in parts])


def _step_ms(run: Run, rank: int) -> float:
    s = run.steps
    own = s[(s["rank"] == rank) & ~s["profiled"] & (s["step"] >= 2)]
    return float(own["step_us"].median()) / 1e3
