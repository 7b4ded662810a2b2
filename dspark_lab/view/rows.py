"""Rows of a table as plain dicts, with the type that the rest of the view reads; and what an arm is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pandas as pd

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run

FEW = 3
"""Replicates from which on an interval is worth showing: of two, Student's t is 12.7 wide."""
TOO_FEW = "too few blocks for an interval"


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One dict a row, columns by name."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))


def rows_with(table: Any, *columns: str, of: str) -> pd.DataFrame:
    """``table`` where it has the ``columns`` that a figure draws, or no rows at all. Raises `LabError` for what ``of`` does not return."""
    if not isinstance(table, pd.DataFrame):
        raise LabError(f"{shown(table)} is no table; give what {of} returned.")
    if len(table) and (missing := [c for c in columns if c not in table]):
        there = ", ".join(map(str, table.columns)) or "none"
        raise LabError(f"the table has no column {missing[0]!r} (it has {there}); give what {of} returned.")
    return table


def by_name(given: Any, what: str) -> Mapping[str, Any]:
    """``given`` where it holds ``what`` by a name. Raises `LabError` for what is no mapping."""
    if not isinstance(given, Mapping):
        raise LabError(f"{shown(given)} is no mapping; give {what} by a name: {{'a name': …}}.")
    return given


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
