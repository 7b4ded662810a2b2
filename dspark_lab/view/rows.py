"""Rows of a table as plain dicts, with the type that the rest of the view reads."""

from __future__ import annotations

from typing import Any, cast

import pandas as pd


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One dict a row, columns by name."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))
