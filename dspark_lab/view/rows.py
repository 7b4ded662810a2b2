"""Rows of a table as plain dicts, with the type that the rest of the view reads; and what an arm is called."""

from __future__ import annotations

from typing import Any, cast

import pandas as pd

from dspark_lab.runs.record import Run

FEW = 3
"""Replicates from which on an interval is worth showing: of two, Student's t is 12.7 wide."""
TOO_FEW = "too few blocks for an interval"


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One dict a row, columns by name."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))


def arm_of(run: Run) -> str:
    """What an arm is called in pictures: its `alloc`, and whether the mask is off."""
    return _called(run.config.engine.alloc, run.config.engine.mask_padding)


def by_arm(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of `lab.compare` with each arm called as in pictures, intervals of fewer than `FEW` replicates left out where they tell nothing."""
    if table is None or not len(table):
        return []
    by, rows = str(table.columns[0]), records(table)
    for r in rows:
        r[by] = _called(r[by], r.get("mask_padding", True)) if by == "alloc" else r[by]
        if is_few(r):
            r["step_ms_ci95"] = r["delta_pct_ci95"] = None
    return rows


def is_few(row: dict[str, Any]) -> bool:
    """Whether a row of `lab.compare` has steps, but too few blocks or processes for an interval; a verdict needs none better."""
    return 0 < int(row.get("num_blocks") or 0) < FEW and row.get("verdict") not in ("slower", "faster")


def _called(alloc: Any, mask: Any) -> str:
    return str(alloc) if mask else f"{alloc} (mask off)"
