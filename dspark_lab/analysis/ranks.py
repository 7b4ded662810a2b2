"""Several ranks of one job: their clocks brought together, who comes last, what that costs the others, all events on one clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.comm import clocks, match_collectives, not_together
from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.summary import SKIPPED_STEPS

COLLECTIVE_COLUMNS = ("step", "ordinal", "name", "last_rank", "skew_us", "wait_us")
RANK_COLUMNS = (
    "rank",
    "offset_us",
    "uncertainty_us",
    "num_last",
    "caused_us_per_step",
    "waited_us_per_step",
    "period_us_p50",
    "profiled",
)
STEP_COLUMNS = ("step", "straggler", "caused_us", "period_us")
#: Ranks whose collectives differ by less came at the same moment: nobody was last.
NOTICE_US = 1.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the ranks wait for each other. Times µs, profiled.

    ranks: one row a rank: how far its clock is ahead of the lowest rank's (offset_us) and how well that is known (uncertainty_us, half the range
        of the middle 80 %); num_last collectives in which it came last; caused_us_per_step, what the other ranks together waited for it, and
        waited_us_per_step, what it waited for others: medians over the third step and later.
    steps: one row a step: straggler (the rank that caused most waiting, −1 none), caused_us, period_us of the slowest rank.
    collectives: one row a matched collective: last_rank (−1: all came within a microsecond), skew_us (first to last), wait_us of all ranks.
    """

    ranks: pd.DataFrame
    steps: pd.DataFrame
    collectives: pd.DataFrame

    @property
    def sentence(self) -> str:
        """The straggler in words."""
        doubt = not_together(self.ranks) or f"clocks are known to ± {self.ranks['uncertainty_us'].max():.1f} µs"
        worst = self.ranks.iloc[int(self.ranks["caused_us_per_step"].to_numpy().argmax())]
        if worst["caused_us_per_step"] < NOTICE_US:
            return f"No straggler: the ranks wait less than {NOTICE_US:g} µs a step for each other; {doubt}."
        mine = int((self.steps["straggler"] == worst["rank"]).sum())
        return (
            f"Rank {int(worst['rank'])} holds the others up in {mine} of {len(self.steps)} steps: they wait {worst['caused_us_per_step']:.1f} µs a "
            f"step for it, in these profiled captures; {doubt}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the single collectives."""
        return {"text": self.sentence, "ranks": self.ranks.to_dict("records"), "steps": self.steps.to_dict("records")}

    def _repr_html_(self) -> str:
        shown = (t.to_html(index=False, float_format=lambda v: f"{v:.1f}") for t in (self.ranks, self.steps))
        return f"<p>{self.sentence}</p>" + "".join(shown)


def ranks(source: Any, *, comm_patterns: Mapping[str, str] | None = None) -> Ranks:
    """Who of several ranks comes last to the collectives, and what the others wait for it.

    The rank that came last to a collective is the one that was quickest in it: durations tell, whatever the clocks say. Clocks are
    brought together by the ends of matched collectives, which are nearly one moment.

    Args:
        source: a folder of ranks, or what `open_trace` takes for several.

    Raises:
        LabError: fewer than two ranks, or no collective that all of them have.
    """
    traces = _several(source)
    matched = match_collectives(traces, comm_patterns)
    apart = clocks(traces, comm_patterns)
    if not len(matched):
        raise LabError(
            f"ranks {', '.join(map(str, traces))} have no collectives in common that could be matched; name yours with comm_patterns={{label: regular expression}}."
        )
    matched["offset"] = matched["rank"].map(apart.set_index("rank")["offset_us"])
    matched["begin"] = (matched["ts_ns"] - matched["ts_ns"].min()) / 1000 - matched["offset"]
    by = matched.groupby(["step", "ordinal"], sort=True)
    order = ["step", "ordinal", "dur_us"]
    last = matched.sort_values(order, kind="stable").drop_duplicates(order[:2]).set_index(order[:2])
    table = pd.DataFrame(
        {
            "name": last["name"],
            "last_rank": np.where(by["peer_wait_us"].max() >= NOTICE_US, last["rank"], -1),
            "skew_us": by["begin"].max() - by["begin"].min(),
            "wait_us": by["peer_wait_us"].sum(),
        }
    ).reset_index()[list(COLLECTIVE_COLUMNS)]
    steps = _steps(traces, table)
    return Ranks(ranks=_ranks(traces, apart, matched, table), steps=steps, collectives=table)


def merged(source: Any, *, comm_patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The events of all ranks on the clock of the lowest: columns of ``Trace.events`` with ``rank`` first, in order of time.

    ``attrs``: ``offset_us`` taken off each rank's times and ``uncertainty_us`` of it, by rank (0 and NaN where no collectives are in
    common: the clocks are then as recorded).
    """
    traces = _several(source)
    table = clocks(traces, comm_patterns).set_index("rank")
    offset = {r: float(table["offset_us"].get(r, 0.0)) for r in traces}
    parts = []
    for rank, trace in traces.items():
        own = trace.events.assign(ts_ns=trace.events["ts_ns"] - round(1000 * offset[rank]))
        for column in ("category", "name"):
            own[column] = own[column].astype(object)
        own.insert(0, "rank", rank)
        parts.append(own)
    out = pd.concat(parts, ignore_index=True).sort_values("ts_ns", kind="stable", ignore_index=True)
    out[["category", "name"]] = out[["category", "name"]].astype("category")
    out.attrs = {
        "offset_us": offset,
        "uncertainty_us": {r: float(table["uncertainty_us"].get(r, np.nan)) for r in traces},
    }
    return out


def _several(source: Any) -> dict[int, Trace]:
    opened = open_trace(source)
    if not isinstance(opened, TraceSet) or len(opened) < 2:
        raise LabError(
            f"{getattr(opened, 'path', source)} holds one rank; give the folder that holds the captures of all ranks."
        )
    return dict(opened)


def _late(traces: Mapping[int, Trace]) -> list[int]:
    """Numbers of the steps that all ranks have, from the third on."""
    common = sorted(set.intersection(*(set(t.step_windows.labels.tolist()) for t in traces.values())))
    return common[SKIPPED_STEPS:] if len(common) > SKIPPED_STEPS else common


def _steps(traces: Mapping[int, Trace], table: pd.DataFrame) -> pd.DataFrame:
    caused = table[table["last_rank"] >= 0].groupby(["step", "last_rank"])["wait_us"].sum()
    rows = []
    for step in sorted(set(table["step"])):
        own = caused[step] if step in caused.index.get_level_values(0) else pd.Series(dtype=float)
        period = max(float(t.steps().set_index("step")["period_us"].get(step, np.nan)) for t in traces.values())
        rows.append((int(step), int(own.idxmax()) if len(own) else -1, float(own.max()) if len(own) else 0.0, period))  # pyright: ignore[reportArgumentType]
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS))


def _ranks(
    traces: Mapping[int, Trace], apart: pd.DataFrame, matched: pd.DataFrame, table: pd.DataFrame
) -> pd.DataFrame:
    late = _late(traces)
    clock = apart.set_index("rank")
    rows = []
    for rank, trace in traces.items():
        caused = table[table["last_rank"] == rank].groupby("step")["wait_us"].sum().reindex(late, fill_value=0.0)
        waited = matched[matched["rank"] == rank].groupby("step")["peer_wait_us"].sum().reindex(late, fill_value=0.0)
        periods = trace.steps().set_index("step")["period_us"].reindex(late)
        rows.append(
            (rank, clock["offset_us"][rank], clock["uncertainty_us"][rank], int((table["last_rank"] == rank).sum()), caused.median(), waited.median(),
             periods.median(), True)
        )  # fmt: skip
    return pd.DataFrame(rows, columns=list(RANK_COLUMNS))
