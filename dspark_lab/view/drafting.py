"""Figures on drafting: acceptance by position, sweeps over γ or threshold, reliability before and after STS, what load leaves to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspark_lab.errors import LabError, unknown
from dspark_lab.study.evaluation import KEYS, Evaluation
from dspark_lab.view.rows import rows_with
from dspark_lab.view.theme import COLOURS, FAINT, INK, message, titled

LINES = [COLOURS[k] for k in ("compute", "wait", "draft", "communication", "copy", "verify", "host")]
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
STAGES = {"raw": (COLOURS["wait"], "as the head gives it"), "sts": (COLOURS["compute"], "after STS")}
SWEPT = {"block_size": "block size γ, draft tokens", "threshold": "confidence threshold", "temperature": "temperature"}


def accepted_by_position(found: Evaluation | pd.DataFrame, *, title: str = "Accepted by position") -> go.Figure:
    """Share of rounds that accept draft token k, a panel a kind of text, a line a drafter (and temperature, γ, threshold where
    they differ), with 95 % intervals over prompts. Takes an `Evaluation`, or rows such as its ``positions()`` has.
    """
    table = found.positions() if isinstance(found, Evaluation) else found
    table = rows_with(table, "kind", "position", "accepted_share", of="lab.evaluate(...).positions()")
    if not len(table):
        return message(title, "No rounds were counted.")
    kinds = list(dict.fromkeys(table["kind"]))
    figure = panels(kinds)
    names = _line_names(table, without=("kind",))
    for at, name in enumerate(dict.fromkeys(names)):
        for column, kind in enumerate(kinds, start=1):
            rows = table[(names == name) & (table["kind"] == kind)]
            line(figure, rows["position"], rows, "accepted_share", name, at, column, "position %{x}: %{y:.3f}")
    figure.update_xaxes(title_text="draft position k", dtick=1, fixedrange=True)
    figure.update_yaxes(range=[0, 1.05])
    figure.update_yaxes(title_text="accepted, share of rounds", col=1)
    return finished(figure, title, [*table["label"].unique(), "accept length = 1 + Σ Pₖ"])


def accept_length_sweep(found: Evaluation | pd.DataFrame, *, by: str = "block_size", title: str | None = None) -> go.Figure:  # fmt: skip
    """Accept length against ``by`` (``block_size``, ``threshold`` or ``temperature``), a panel a kind of text, with intervals.

    Over a threshold also the acceptance rate, committed tokens over verified rows, in panels below.
    """
    if by not in SWEPT:
        raise unknown("by", by, SWEPT)
    table = found.table() if isinstance(found, Evaluation) else found
    table = rows_with(table, by, "kind", "accept_length", of="lab.evaluate(...).table()")
    title = title or f"Accept length against {SWEPT[by].partition(',')[0]}"
    if not len(table) or table[by].nunique() < 2:
        return message(title, f"Only one {by} was measured: give lab.evaluate several.")
    kinds = list(dict.fromkeys(table["kind"]))
    rates = by == "threshold"
    figure = panels(kinds, num_rows=2 if rates else 1)
    names = _line_names(table, without=("kind", by))
    for at, name in enumerate(dict.fromkeys(names)):
        for column, kind in enumerate(kinds, start=1):
            rows = table[(names == name) & (table["kind"] == kind)].sort_values(by)
            line(figure, rows[by], rows, "accept_length", name, at, column, f"{by} %{{x:g}}: %{{y:.2f}} tokens a round")
            if rates:
                _rate(figure, rows, name, at, column)
    figure.update_xaxes(dtick=1 if by == "block_size" else None, fixedrange=True)
    figure.update_xaxes(title_text=SWEPT[by], row=2 if rates else 1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="tokens a round, bonus included", row=1, col=1)
    if rates:
        figure.update_yaxes(range=[0, 1.05], title_text="committed / verified rows", row=2, col=1)
        figure.update_yaxes(range=[0, 1.05], row=2)
    return finished(figure, title, list(table["label"].unique()), height=560 if rates else 400)


def reliability(table: pd.DataFrame, *, positions: Sequence[int] | None = None, title: str = "Reliability of confidence", label: str = "") -> go.Figure:  # fmt: skip
    """Reliability diagrams from `lab.reliability`: promised against accepted share, a panel a position (by default the first,
    the middle and the last), before and after STS. A point's size goes by its rounds; bars are Wilson's 95 % intervals.
    """
    table = rows_with(table, "position", "stage", "confidence", "accepted_share", of="lab.reliability")
    if not len(table):
        return message(title, "No rounds were counted.")
    there = sorted(table["position"].unique())
    shown = list(positions) if positions is not None else sorted({there[0], there[len(there) // 2], there[-1]})
    if missing := [k for k in shown if k not in there]:
        raise LabError(f"positions={shown} has {missing[0]}, and there are {there[0]} to {there[-1]}.")
    figure = panels(["the first draft" if k == 1 else f"the first {k} drafts" for k in shown])
    for column, k in enumerate(shown, start=1):
        figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": FAINT, "width": 1, "dash": "dot"}, showlegend=False, hoverinfo="skip", row=1, col=column)  # fmt: skip
        for stage, rows in table[table["position"] == k].groupby("stage", sort=False):
            _reliability_points(figure, str(stage), rows, column)
    figure.update_xaxes(title_text="promised: Π confidence", range=[0, 1], fixedrange=True)
    figure.update_yaxes(range=[0, 1.02])
    figure.update_yaxes(title_text="accepted, share of rounds", col=1)
    counts = int(table[(table["position"] == there[0]) & (table["stage"] == "raw")]["num_rounds"].sum())
    return finished(figure, title, [label, f"{counts:,} rounds"])


def verify_budget(table: pd.DataFrame, *, title: str = "What is verified as load grows", label: str = "") -> go.Figure:
    """Rows verified a request and round (anchor counted) against requests at once, from `lab.schedule_regret`: the deployed
    scheduler, and the fixed length that is best in hindsight. The accept length stands beside them.
    """
    table = rows_with(table, "num_requests", "verify_len", "best_length", "accept_length", of="lab.schedule_regret")
    if not len(table):
        return message(title, "No load was rehearsed.")
    figure, x = go.Figure(), table["num_requests"]
    lines = (
        ("verify_len", 0, "verified by the scheduler", LINES[0], "solid"),
        ("best_length", 1, "best fixed length in hindsight", INK, "dash"),
        ("accept_length", 0, "accept length", LINES[2], "dot"),
    )
    for column, more, name, colour, dash in lines:
        figure.add_scatter(x=x, y=table[column] + more, mode="lines+markers", name=name, line={"color": colour, "dash": dash},
                           hovertemplate=f"%{{x}} requests: %{{y:.2f}}, {name}<extra></extra>")  # fmt: skip
    figure.update_xaxes(title_text="requests at once", type="log", tickvals=list(x), ticktext=[str(v) for v in x])
    figure.update_yaxes(title_text="rows or tokens a request and round", rangemode="tozero")
    return finished(figure, title, [label, "simulated: rehearsed on real texts with a cost table"])


# -- parts -------------------------------------------------------------------------------------------------------------


def panels(titles: Sequence[str], *, num_rows: int = 1) -> go.Figure:
    """A row of panels under their titles, on one scale."""
    return make_subplots(
        rows=num_rows, cols=len(titles), subplot_titles=list(titles), shared_yaxes=True, shared_xaxes=True,
        horizontal_spacing=0.05, vertical_spacing=0.08,
    )  # fmt: skip


def _line_names(table: pd.DataFrame, *, without: tuple[str, ...]) -> pd.Series:
    """What each row's line is called: by the drafter, and by whatever else differs."""
    said = {"temperature": "T={}", "block_size": "γ {}", "threshold": "threshold {}", "drafter": "{}"}
    told = [k for k in KEYS if k not in without and (k == "drafter" or table[k].nunique() > 1)]
    return table.apply(lambda row: ", ".join(said[k].format(row[k]) for k in told), axis=1)


def line(figure: go.Figure, x: Any, rows: pd.DataFrame, y: str, name: str, at: int, column: int, hover: str) -> None:
    """A line with its intervals in one panel of the first row."""
    colour, value = LINES[at % len(LINES)], rows[y]
    bars = {"type": "data", "symmetric": False, "array": rows["high"] - value, "arrayminus": value - rows["low"],
            "thickness": 1, "width": 2, "color": colour}  # fmt: skip
    figure.add_scatter(
        x=x, y=value, error_y=bars, mode="lines+markers", name=name, legendgroup=name, showlegend=column == 1,
        line={"color": colour, "width": 2}, marker={"symbol": SYMBOLS[at % len(SYMBOLS)], "size": 7},
        hovertemplate=f"{name}, {hover}<extra></extra>", row=1, col=column,
    )  # fmt: skip


def _rate(figure: go.Figure, rows: pd.DataFrame, name: str, at: int, column: int) -> None:
    figure.add_scatter(
        x=rows["threshold"], y=rows["acceptance_rate"], mode="lines+markers", legendgroup=name, showlegend=False,
        line={"color": LINES[at % len(LINES)], "width": 2}, marker={"symbol": SYMBOLS[at % len(SYMBOLS)], "size": 7},
        hovertemplate=f"{name}, threshold %{{x:g}}: %{{y:.1%}} of verified rows committed<extra></extra>", row=2, col=column,
    )  # fmt: skip


def _reliability_points(figure: go.Figure, stage: str, rows: pd.DataFrame, column: int) -> None:
    colour, name = STAGES[stage]
    share = rows["accepted_share"]
    bars = {"type": "data", "symmetric": False, "array": rows["accepted_high"] - share, "arrayminus": share - rows["accepted_low"],
            "thickness": 1, "width": 0, "color": colour}  # fmt: skip
    size = 5 + 12 * (rows["num_rounds"] / rows["num_rounds"].max()) ** 0.5
    figure.add_scatter(
        x=rows["confidence"], y=share, error_y=bars, mode="markers", name=name, legendgroup=name, showlegend=column == 1,
        marker={"color": colour, "size": size, "symbol": "circle" if stage == "sts" else "circle-open", "line": {"width": 1.5, "color": colour}},
        customdata=rows["num_rounds"], hovertemplate=f"{name}: %{{x:.3f}} promised, %{{y:.3f}} accepted, %{{customdata}} rounds<extra></extra>",
        row=1, col=column,
    )  # fmt: skip


def finished(figure: go.Figure, title: str, notes: Sequence[str], *, height: int = 400) -> go.Figure:
    """``figure`` with its title and ``notes`` as the label line."""
    figure.update_layout(showlegend=True, margin={"b": 92, "t": 84})
    return titled(figure, title, " · ".join(dict.fromkeys(n for n in notes if n)), height=height)
