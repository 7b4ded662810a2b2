"""Fixtures for all tests: where the captures lie, and small runs made by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dspark_lab.config import preset
from dspark_lab.runs.record import STEP_COLUMNS, Acceptance, Run

os.environ.setdefault("OMP_NUM_THREADS", "1")

DATA = Path(__file__).parent / "data"
EIGHT_ROUNDS = Acceptance(accepted=(2, 2, 0, 0, 0, 4), proposed=(0, 0, 0, 0, 0, 8))


@pytest.fixture(scope="session")
def h200() -> Path:
    """Eight-step captures of a decode loop on H200s."""
    return DATA / "traces" / "h200"


@pytest.fixture(scope="session")
def hostile() -> Path:
    """Broken and tricky captures, one folder a case."""
    return DATA / "traces" / "hostile"


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Run]:
    """Builds a `Run` of the tiny preset: ``step_us`` a step, ``num_repeats`` blocks, ``num_ranks`` ranks (rank r is r µs slower)."""

    def build(
        *,
        name: str = "run",
        step_us: float = 1000.0,
        num_steps: int = 6,
        num_repeats: int = 2,
        num_ranks: int = 1,
        profiled: bool = False,
        traces: tuple[Path, ...] = (),
        acceptance: Acceptance | None = EIGHT_ROUNDS,
        role: str = "arm",
        **toggles: Any,
    ) -> Run:
        rows = [
            {
                "process": 0,
                "repeat": repeat,
                "step": step,
                "rank": rank,
                "profiled": profiled,
                "step_us": step_us + 10 * step + 100 * repeat + rank,
                "host_us": step_us / 2,
                "num_requests": 4,
                "num_committed": 8,
            }
            for repeat in range(num_repeats)
            for step in range(num_steps)
            for rank in range(num_ranks)
        ]
        return Run(
            name=name,
            config=preset("tiny", **toggles),
            source="measured",
            steps=pd.DataFrame(rows, columns=list(STEP_COLUMNS)).astype(STEP_COLUMNS),
            environment={"device": "cpu", "device_name": "CPU (test)", "recorded_at": "2026-11-30T00:00:00+00:00"},
            acceptance=acceptance,
            trace_paths=traces,
            role=role,
        )

    return build
