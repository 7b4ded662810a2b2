"""`training_curves`: a training's losses and accept length, step by step."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspark_lab.view.drafting import finished
from dspark_lab.view.rows import rows_with
from dspark_lab.view.theme import COLOURS, INK, message

LOSSES = {
    "total": (INK, "solid", "total, weighted"),
    "ce": (COLOURS["compute"], "dot", "cross entropy"),
    "l1": (COLOURS["draft"], "dash", "L1 to the target"),
    "confidence": (COLOURS["copy"], "dashdot", "confidence"),
}
"""Columns of a history that are losses: colour, dash, and what they are called."""


def training_curves(history: pd.DataFrame | Any, *, title: str = "Training", label: str = "") -> go.Figure:
    """Losses on the left, expected tokens a round on the right, against the step; both of the logged batches, at temperature 1.

    ``history``: what `lab.train_drafter` returned, or its ``history``. ``label`` says source and device.
    """
    table = rows_with(getattr(history, "history", history), "step", of="lab.train_drafter")
    label = label or ("" if isinstance(history, pd.DataFrame) else f"measured · {history.device}")
    if not len(table):
        return message(title, "No step has been logged yet.", height=400)
    figure = make_subplots(rows=1, cols=2, subplot_titles=["loss", "accept length"], horizontal_spacing=0.13)
    for name, (colour, dash, said) in LOSSES.items():
        if name in table and table[name].abs().max() > 0:
            figure.add_scatter(
                x=table["step"], y=table[name], mode="lines", name=said, line={"color": colour, "width": 2, "dash": dash},
                hovertemplate=f"step %{{x}}: {said} %{{y:.3f}}<extra></extra>", row=1, col=1,
            )  # fmt: skip
    if "accept_length" in table:
        figure.add_scatter(
            x=table["step"], y=table["accept_length"], mode="lines+markers", name="accept length, training batch", marker={"size": 4},
            line={"color": COLOURS["verify"], "width": 2}, hovertemplate="step %{x}: %{y:.2f} tokens a round<extra></extra>", row=1, col=2,
        )  # fmt: skip
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="nats, or as the loss has it", rangemode="tozero", col=1)
    figure.update_yaxes(title_text="tokens a round, bonus included", col=2)
    return finished(figure, title, [label])
