"""What the panel shows now, and figures kept for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dspark_lab.runs.record import Run

KEPT = 96
_figures: OrderedDict[Any, go.Figure] = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the panel shows now: the runs, their table, and where they are from."""

    runs: tuple[Run, ...]
    table: pd.DataFrame
    hint: str = ""
    """Said in place of a picture where there are no runs."""

    @property
    def arms(self) -> list[Run]:
        """Runs with steps of their own: no A/A pairs, no arm that shares the code path of another one shown."""
        arms = [r for r in self.runs if r.role == "arm"]
        shown = {r.config.engine.alloc for r in arms}
        return [r for r in arms if not r.same_path_as or r.same_path_as not in shown]

    @property
    def captured(self) -> list[Run]:
        """The arms that have a capture."""
        return [r for r in self.arms if r.trace_paths]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((r.name, str(r.path), r.status, len(r.steps)) for r in self.runs)

    @property
    def no_capture(self) -> str:
        """Why there is no capture of the runs shown."""
        if self.hint:
            return self.hint
        if any(r.shown_source == "recorded" for r in self.arms):
            return "No capture ships with these recordings, only their step tables: see Latency and Compare."
        return "No capture in these runs: profiled steps 0, or stopped before the capture."


def kept(key: Any, make: Callable[[], go.Figure]) -> go.Figure:
    """A figure made once for ``key``; so that a toggle that was turned before answers at once."""
    if key not in _figures:
        _figures[key] = make()
        while len(_figures) > KEPT:
            _figures.popitem(last=False)
    _figures.move_to_end(key)
    return _figures[key]
