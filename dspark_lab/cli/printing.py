"""What commands print: JSON without NaN, tables that are never cut, a progress bar on standard error."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import nullcontext
from typing import Any

import pandas as pd
from rich.console import Console
from rich.highlighter import JSONHighlighter

from dspark_lab.runs.record import json_text

console = Console() if sys.stdout.isatty() else Console(width=140)


def show(value: Any, as_json: bool) -> None:
    if as_json:
        plain = value.to_dict("records") if isinstance(value, pd.DataFrame) else value
        sys.stdout.write(json.dumps(_strict(plain), default=str) + "\n")
    elif isinstance(value, pd.DataFrame):
        print_table(value)
    else:
        plain = json.loads(json.dumps(_strict(value), default=str))
        console.print(JSONHighlighter()(json_text(plain).rstrip()), soft_wrap=True)


def say(text: str) -> None:
    """One sentence as it stands, wrapped by the terminal."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def print_table(table: pd.DataFrame) -> None:
    from rich.table import Table

    shown = _arms_table(table) if "verdict" in table.columns else _recorded_table(table)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    widths = {c: max([len(str(c)), *(len(_cell(x)) for x in shown[c])]) for c in shown.columns}
    whole = sum(min(w, _SHORT) + 2 for w in widths.values()) <= console.width  # else every column folds: nothing is cut
    for column, width in widths.items():
        number = shown[column].dtype.kind in "fi" or all(_NUMBER.fullmatch(str(x)) for x in shown[column])
        no_wrap = whole and (number or width <= _SHORT)
        grid.add_column(str(column), justify="right" if number else "left", no_wrap=no_wrap, overflow="fold")
    for row in shown.itertuples(index=False):
        grid.add_row(*(_cell(x) for x in row))
    console.print(grid)
    if "verdict" in table.columns:
        for note in sorted(
            {*table["label"], *(f"{a}: {r}" for a, r in zip(table.iloc[:, 0], table["reason"], strict=True) if r)}
        ):
            console.print(f"  {note}", style="dim")


_NUMBER = re.compile(r"[-+]?[0-9.]+|–")
_SHORT = 22
"""Cells up to this long are never folded; longer ones share what a narrow terminal leaves."""
_RECORDED = {"name": "name", "alloc": "alloc", "ep_size": "EP", "tp_size": "TP", "batch_size": "batch", "step_ms_p50": "step ms",
             "label": "label"}  # fmt: skip


def _recorded_table(table: pd.DataFrame) -> pd.DataFrame:
    """Recordings in few columns; any other table as it is."""
    return table[list(_RECORDED)].rename(columns=_RECORDED) if set(_RECORDED) <= set(table.columns) else table


def _arms_table(table: pd.DataFrame) -> pd.DataFrame:
    """A comparison in few columns: figures with their intervals beside them."""
    by = table.columns[0]
    mask = ["" if on else " (mask off)" for on in table["mask_padding"]]
    return pd.DataFrame(
        {
            by: [f"{a}{m}" for a, m in zip(table[by], mask, strict=True)],
            "EP": table["ep_size"],
            "TP": table["tp_size"],
            "step ms": [
                _with_interval(x, ci) for x, ci in zip(table["step_ms_p50"], table["step_ms_ci95"], strict=True)
            ],
            "delta %": [
                _with_interval(x, ci) for x, ci in zip(table["delta_pct"], table["delta_pct_ci95"], strict=True)
            ],
            "verdict": table["verdict"],
            "accept": table["accept_length"],
            "tokens/s": [f"{x:.0f}" if x == x else "–" for x in table["tokens_per_s"]],
            "same path as": [x or "" for x in table["same_path_as"]],
        }
    )


def _with_interval(x: float, ci: list[float] | None) -> str:
    return _cell(float(x)) if ci is None else f"{x:.3f} [{ci[0]:.2f}, {ci[1]:.2f}]"


def _cell(x: Any) -> str:
    if isinstance(x, list):
        return "[" + ", ".join(_cell(v) for v in x) + "]"
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return "–"
    return f"{x:.3f}" if isinstance(x, float) else str(x)


def _strict(x: Any) -> Any:
    """JSON without NaN: null in its place."""
    if isinstance(x, dict):
        return {str(k): _strict(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_strict(v) for v in x]
    if hasattr(x, "item"):
        x = x.item()
    return None if isinstance(x, float) and not math.isfinite(x) else x


def busy(text: str) -> Any:
    """A context: a sign on standard error that work goes on; nothing where that is no terminal."""
    error = Console(stderr=True)
    return error.status(text) if error.is_terminal else nullcontext()


class progress:
    """A progress bar on standard error while a job runs; silent where that is no terminal."""

    def __enter__(self):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.percentage:3.0f} %"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task("starting", total=1.0)
        return self._update

    def _update(self, p: Any) -> None:
        text = f"{p.arm} block {p.repeat + 1} step {p.step}/{p.num_steps}" if p.arm else p.message or p.state
        self._bar.update(self._task, completed=p.fraction, description=text)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("dspark-lab: stopped; what was measured is kept as runs marked stopped.\n")
