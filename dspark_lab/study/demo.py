"""The main job without a browser: the seed's arms live on this machine, under it the recorded H200 ones, and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from dspark_lab.analysis.latency import compare
from dspark_lab.config import preset
from dspark_lab.export.tensorboard import to_tensorboard
from dspark_lab.runs.runner import sweep
from dspark_lab.runs.spec import Progress
from dspark_lab.runs.store import recorded_runs

ARMS = ["none", "blocking", "non_blocking", "on_demand"]
"""Before the regression, sglang #33465, #34782 alone, #34759."""


@dataclass(frozen=True)
class Demo:
    """What the demo made."""

    tables: dict[str, pd.DataFrame]
    logdir: Path


def demo(*, logdir: Path | str = "tb", on_progress: Callable[[Progress], None] | None = None) -> Demo:
    """Compares `ARMS` on this machine and as recorded, and writes all of it below ``logdir``."""
    live = sweep(preset("shipped"), alloc=ARMS, num_steps=32, repeats=3, profile_steps=4, on_progress=on_progress)
    cells = [recorded_runs(preset="seed"), recorded_runs(sheet="small", batch_size=1)]
    shipped = [
        r
        for cell in cells
        for r in cell
        if r.config.engine.use_graph and r.acceptance and r.config.engine.alloc in ARMS
    ]
    tables = {
        "This machine, live (shipped: a small trained pair on held-out text)": compare(live),
        "Recorded on H200s, unprofiled (the seed's cell at TP2, and small on one GPU; CUDA graphs, run-ahead)": compare(
            shipped
        ),
    }
    return Demo(tables=tables, logdir=to_tensorboard([*live, *shipped], logdir=logdir))
