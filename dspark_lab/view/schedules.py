"""Figures on schedules: what a verify forward costs, what each budget is worth, what was verified round by round, and where drafts break even."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import Costs
from dspark_lab.plan.schedule import best_budget, early_stop, objective
from dspark_lab.plan.sps import SpsProfile
from dspark_lab.view.rows import by_name, rows_with
from dspark_lab.view.theme import COLOURS, FAINT, INK, message, stroke, titled

LINES = [COLOURS[k] for k in ("compute", "wait", "draft", "communication", "copy", "verify", "host")]
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")


def step_costs(profile: SpsProfile, costs: Costs | None = None, *, title: str = "What a round costs by its load", label: str = "") -> go.Figure:  # fmt: skip
    """Measured points of ``profile``, ms against rows of the verify forward, a colour a number of requests; as lines what
    ``costs`` says of them (``profile.additive()``, say), which is what a scheduler reads.
    """
    if not isinstance(profile, SpsProfile):
        raise LabError(f"{shown(profile)} is no cost profile; lab.profile_costs and lab.load_sps give one.")
    figure = go.Figure()
    for at, num_requests in enumerate(sorted(set(profile.requests))):
        points = [(b, s) for r, b, s in zip(profile.requests, profile.tokens, profile.seconds, strict=True) if r == num_requests]  # fmt: skip
        x = np.array([b for b, _ in points])
        colour, name = LINES[at % len(LINES)], f"{num_requests} request{'s' * (num_requests > 1)}"
        figure.add_scatter(
            x=x, y=[1e3 * s for _, s in points], mode="markers", name=f"{name}, {profile.source}",
            marker={"color": colour, "size": 8, "symbol": stroke(profile.source)["symbol"]},
            hovertemplate=f"{name}, %{{x}} rows: %{{y:.2f}} ms<extra></extra>",
        )  # fmt: skip
        if costs is not None:
            figure.add_scatter(
                x=x, y=1e3 * costs.seconds_at(num_requests, x), mode="lines", name=f"{name}, as the scheduler reads it",
                line={"color": colour, "width": 1.5, "dash": "dot"}, hovertemplate=f"{name}, %{{x}} rows: %{{y:.2f}} ms in the table<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(title_text="rows of the verify forward, anchors counted", rangemode="tozero")
    figure.update_yaxes(title_text="a round, ms", rangemode="tozero")
    return _finished(figure, title, [label, _said_of(profile)])


def budget_worth(survivals: np.ndarray, costs: Mapping[str, Costs], *, title: str = "What each budget is worth", label: str = "simulated") -> go.Figure:  # fmt: skip
    """Θ(K) = τ / T in tokens a second against the budget K, a line a cost table: the global maximum ringed, early stop a cross.

    ``survivals`` [R, γ] as `plan.schedule.survival` gives them.
    """
    if not by_name(costs, "cost tables"):
        return message(title, "No cost table was given.")
    figure = go.Figure()
    for at, (name, table) in enumerate(costs.items()):
        worth = objective(survivals, table)
        colour = LINES[at % len(LINES)]
        figure.add_scatter(
            x=list(range(len(worth))), y=worth, mode="lines+markers", name=name, line={"color": colour, "width": 2},
            hovertemplate=f"{name}, K=%{{x}}: %{{y:.1f}} tokens/s<extra></extra>",
        )  # fmt: skip
        stopped = early_stop(survivals, table).budget
        for k, symbol in ((best_budget(survivals, table), "circle-open"), (stopped, "x-thin")):
            figure.add_scatter(
                x=[k], y=[worth[k or 0]], mode="markers", showlegend=False, hoverinfo="skip",
                marker={"color": colour, "size": 17 if symbol == "circle-open" else 12, "symbol": symbol, "line": {"width": 2, "color": colour}},
            )  # fmt: skip
    figure.update_xaxes(title_text="budget K, drafts verified of all requests", dtick=1)
    figure.update_yaxes(title_text="Θ, tokens a second")
    return _finished(figure, title, [label, "ring: global maximum; cross: where early stop ends"])


def verify_lengths(generated: Mapping[str, Any], *, title: str = "What is verified, round by round", label: str = "") -> go.Figure:  # fmt: skip
    """Rows verified a request (anchor counted), mean over requests, against the round; a line each of ``generated``, which
    holds lists of what `lab.generate` gives by a name. Raises `LabError` where one of them holds no rounds.
    """
    figure = go.Figure()
    for at, (name, made) in enumerate(by_name(generated, "lists of what lab.generate returns").items()):
        if not isinstance(made, Sequence) or not all(hasattr(one, "proposal_lengths") for one in made):
            raise LabError(f"{name!r} holds {shown(made)}; give a list of what lab.generate returns.")
        rows = [np.asarray(one.proposal_lengths) + 1 for one in made]
        if not rows or not max(map(len, rows)):
            raise LabError(f"{name!r} has no rounds; generate with speculation.")
        means = [float(np.mean([r[i] for r in rows if i < len(r)])) for i in range(max(map(len, rows)))]
        kept = sum(sum(one.acceptance_lengths) for one in made) / sum(map(sum, rows))
        figure.add_scatter(
            x=list(range(1, len(means) + 1)), y=means, mode="lines+markers", name=f"{name}: {kept:.0%} of verified rows kept",
            line={"color": LINES[at % len(LINES)], "width": 2}, marker={"symbol": SYMBOLS[at % len(SYMBOLS)], "size": 6},
            hovertemplate=f"{name}, round %{{x}}: %{{y:.2f}} rows a request<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(title_text="rows verified a request", rangemode="tozero")
    return _finished(figure, title, [label])


def break_even(
    tables: Mapping[str, pd.DataFrame], *, title: str = "Is speculation worth it", label: str = ""
) -> go.Figure:
    """Accept length against the round's price t_round / t_plain, with the line where both are equal: above it drafts pay, and
    the speed-up is how many times above. ``tables``: rows as `lab.speculation` gives them by a name; a column ``point`` says
    what each is called (the batch, where there is none).
    """
    for table in by_name(tables, "rows of lab.speculation").values():
        rows_with(table, "break_even", "accept_length", of="lab.speculation")
    if not sum(map(len, tables.values())):
        return message(title, "No pair of runs with and without drafts.")
    filled = pd.concat([t[["break_even", "accept_length"]] for t in tables.values()])
    right, top = 1.5 * float(filled["break_even"].max()), 1.15 * float(filled["accept_length"].max())
    figure, end = go.Figure(), max(right, top)
    for name, factor, look in (
        ("break-even: accept length = t_round / t_plain", 1, {"color": INK, "width": 1.5, "dash": "dash"}),
        ("twice as fast", 2, {"color": FAINT, "width": 1, "dash": "dot"}),
    ):
        figure.add_scatter(x=[0, end], y=[0, factor * end], mode="lines", name=name, line=look, hoverinfo="skip")
    for at, (name, table) in enumerate(tables.items()):
        points = table["point"] if "point" in table else [f"batch {b}" for b in table["batch_size"]]
        figure.add_scatter(
            x=table["break_even"], y=table["accept_length"], mode="markers+text", name=name, text=list(points),
            textposition="top center" if at % 2 else "bottom center", textfont={"size": 10.5},
            customdata=table["accept_length"] / table["break_even"],
            marker={"color": LINES[at % len(LINES)], "size": 9, "symbol": SYMBOLS[at % len(SYMBOLS)]},
            hovertemplate=f"{name}, %{{text}}: %{{y:.2f}} tokens a round that costs %{{x:.2f}} plain steps, %{{customdata:.2f}} times as fast<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="t_round / t_plain", range=[0, right])
    figure.update_yaxes(title_text="accept length, tokens a round", range=[0, top])
    return _finished(figure, title, [label], height=460)


def _said_of(profile: SpsProfile) -> str:
    """Where a profile's times come from, and how far steps at one point scatter."""
    protocol = profile.environment.get("protocol", {})
    parts = [profile.source, profile.environment.get("device_name", "")]
    if "spread_pct" in protocol:
        parts.append(
            f"unprofiled, {protocol['num_steps']} rounds a point, which scatter by {protocol['spread_pct']:.0f} %"
        )
    return " · ".join(p for p in parts if p)


def _finished(figure: go.Figure, title: str, notes: Sequence[str], *, height: int = 400) -> go.Figure:
    figure.update_layout(showlegend=True, margin={"b": 108, "t": 72})
    return titled(figure, title, " · ".join(n for n in notes if n), height=height)
