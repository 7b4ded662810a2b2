"""Makes the runs that ship, out of a folder of captures: python data/recorded/import_captures.py FOLDER

The captures are copied as they are, and their steps are kept as profiled rows. The medians of the same loop without the
profiler are known only as a summary: they stand in `quoted`, and they alone are quoted as a step.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from dspark_lab.config import LabConfig, preset
from dspark_lab.runs.record import STEP_COLUMNS, Run
from dspark_lab.trace import Trace, open_trace

FLOOR = "Arms ran in fixed order in one process; differences under about 1 % are not established."
LOOP = (
    "A throw-away loop with the shape of the DSpark step, not this package's engine: a draft graph (3 layers) and a verify graph "
    "(12 layers) replayed once a step, hidden size 2048, block of 5, 2048 context tokens, bfloat16, random weights, no acceptance, "
    "the host two steps ahead, 128 steps, 5 interleaved repeats, median. The predicate is false, so the scalar is not read. "
)
MOE = "64 experts of 1024, 6 a token; one GPU. "
DENSE = (
    "Dense layers (the width of their MLP was not noted), two all-reduces a layer inside the graphs; two GPUs over NVLink (NV18). "
    "Another process gave 1.469 ms without the scalar and 1.561 ms with it blocking. "
)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One run to make."""

    name: str
    captures: tuple[str, ...]
    alloc: str
    tp_size: int
    step_ms_p50: float


RUNS = (
    Recorded(name="h200-moe-none", captures=("trace_none",), alloc="none", tp_size=1, step_ms_p50=3.285),
    Recorded(name="h200-moe-blocking", captures=("trace_blocking",), alloc="blocking", tp_size=1, step_ms_p50=3.357),
    Recorded(
        name="h200-moe-non_blocking",
        captures=("trace_non_blocking",),
        alloc="non_blocking",
        tp_size=1,
        step_ms_p50=3.263,
    ),
    Recorded(
        name="h200-tp2-none",
        captures=("tp2_bs1_hw0_none_rank0", "tp2_bs1_hw0_none_rank1"),
        alloc="none",
        tp_size=2,
        step_ms_p50=1.477,
    ),
    Recorded(
        name="h200-tp2-blocking",
        captures=("tp2_bs1_hw0_blocking_rank0", "tp2_bs1_hw0_blocking_rank1"),
        alloc="blocking",
        tp_size=2,
        step_ms_p50=1.566,
    ),
)


def config(what: Recorded) -> LabConfig:
    dense = {
        f"{who}_{field}": 0
        for who in ("target", "draft")
        for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    }
    return preset(
        "small",
        device="cuda",
        alloc=what.alloc,
        tp_size=what.tp_size,
        use_graph=True,
        overlap=True,
        simulated_accept_length=None,
        **(dense if what.tp_size > 1 else {}),
    )


def profiled_steps(trace: Trace, rank: int) -> pd.DataFrame:
    """The capture's own steps as rows of a step table: the period as ``step_us``, the annotation's length as ``host_us``."""
    steps = trace.steps()
    return pd.DataFrame(
        {
            "process": 0,
            "repeat": 0,
            "step": steps["step"],
            "rank": rank,
            "profiled": True,
            "step_us": steps["period_us"],
            "host_us": (steps["host_end_ns"] - steps["host_start_ns"]) / 1e3,
            "num_requests": 1,
            "num_committed": 0,
        }
    ).astype(STEP_COLUMNS)


def make(what: Recorded, captures: Path, into: Path) -> Run:
    """Writes ``into/name`` from the captures of ``what``."""
    with tempfile.TemporaryDirectory() as tmp:
        copies, tables = [], []
        for rank, stem in enumerate(what.captures):
            source = captures / f"{stem}.json.gz"
            trace = open_trace(source)
            assert isinstance(trace, Trace)
            tables.append(profiled_steps(trace, rank))
            began_ns = int(trace.steps()["host_start_ns"].iloc[0])
            copies.append(shutil.copyfile(source, Path(tmp) / f"rank{rank}.{began_ns}.pt.trace.json.gz"))
        run = Run(
            name=what.name,
            config=config(what),
            source="measured",
            steps=pd.concat(tables, ignore_index=True),
            environment={
                "device": "cuda",
                "device_name": "NVIDIA H200",
                "num_devices": what.tp_size,
                "torch": "2.11.0+cu130",
                "cuda": "13.0",
                "recorded_at": "2026-11-29",
            },
            quoted={
                "step_ms_p50": what.step_ms_p50,
                "floor_pct": 1.0,
                "protocol": LOOP + (DENSE if what.tp_size > 1 else MOE) + FLOOR,
            },
            trace_paths=tuple(copies),
        )
        return run.save(into / what.name)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    for what in RUNS:
        made = make(what, Path(sys.argv[1]), Path(__file__).parent)
        print(made.path, made.step_ms_p50, made.label)
