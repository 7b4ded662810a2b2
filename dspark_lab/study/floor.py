"""Runs against their byte floor: how far a measured step is from what its memory traffic alone would take."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dspark_lab.errors import LabError
from dspark_lab.plan.floor import H200_READ_BYTES_PER_S, step_bytes
from dspark_lab.runs.record import Run, as_runs

COLUMNS = ("name", "batch_size", "step_us", "floor_us", "ratio", "attention_mb", "experts_mb", "heads_mb", "markov_mb", "kv_mb",
           "experts_hit", "label")  # fmt: skip


def byte_floor(runs: Sequence[Run], *, read_bytes_per_s: float = H200_READ_BYTES_PER_S) -> pd.DataFrame:
    """A row a run: measured step (median, unprofiled), floor and their ratio, megabytes by part, experts hit a layer.

    A/A pairs are left out: experts are counted once a config.

    Raises `LabError` for a run without expert counts.
    """
    rows = []
    for run in (r for r in as_runs(runs) if r.role == "arm"):
        counted = next((e for e in run.ep if e.get("rank") == 0), None)
        if counted is None or "experts_hit" not in counted.get("target", {}):
            raise LabError(f"{run.name} holds no expert counts; measure it with lab.sweep, which counts them.")
        target, draft = counted["target"]["experts_hit"], counted.get("drafter", {}).get("experts_hit", [])
        committed = (
            run.step_us().groupby(["process", "repeat"])["num_committed"].sum().mean() / run.config.engine.batch_size
        )
        context = run.config.engine.prompt_len + float(committed) / 2
        parts = step_bytes(run.config, target_hits=target, draft_hits=draft, context=context)
        step_us, floor_us = 1e3 * run.step_ms_p50, parts.floor_us(read_bytes_per_s)
        megabytes = {f"{k}_mb": getattr(parts, k) / 1e6 for k in ("attention", "experts", "heads", "markov", "kv")}
        rows.append(
            {
                "name": run.name,
                "batch_size": run.config.engine.batch_size,
                "step_us": step_us,
                "floor_us": floor_us,
                "ratio": step_us / floor_us,
                **megabytes,
                "experts_hit": sum(target) / max(len(target), 1),
                "label": run.label,
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))
