"""`depth_sweep`: what drafters accept against their number of layers."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dspark_lab.analysis.depths import MEAN
from dspark_lab.view.drafting import LINES, SYMBOLS, finished, line, panels
from dspark_lab.view.rows import rows_with
from dspark_lab.view.theme import message


def depth_sweep(table: pd.DataFrame, *, title: str = "Accept length against the drafter's depth") -> go.Figure:
    """Accept length against layers from `lab.depth_table`: a panel a kind of text and one of their mean, a line a drafter, with
    95 % intervals over texts. Single seeds, where there are several, are the small open points. A drafter of one depth is a point,
    with a dotted line across that the others can be held against.
    """
    table = rows_with(table, "kind", "drafter", "num_layers", "by_seed", of="lab.depth_table()")
    if not len(table):
        return message(title, "No depth was measured.")
    kinds = list(dict.fromkeys(table["kind"]))
    figure = panels([f"{MEAN} of the {len(kinds) - 1}" if kind == MEAN else kind for kind in kinds])
    for at, name in enumerate(dict.fromkeys(table["drafter"])):
        for column, kind in enumerate(kinds, start=1):
            rows = table[(table["drafter"] == name) & (table["kind"] == kind)].sort_values("num_layers")
            x = rows["num_layers"]
            line(figure, x, rows, "accept_length", name, at, column, "%{x} layers: %{y:.2f} tokens a round")
            _seeds(figure, rows, at, column)
            if len(rows) == 1:
                figure.add_hline(
                    y=float(rows["accept_length"].iloc[0]), line={"color": LINES[at % len(LINES)], "width": 1, "dash": "dot"},
                    row=1, col=column,  # pyright: ignore[reportArgumentType]
                )  # fmt: skip
    figure.update_xaxes(title_text="layers of the drafter", dtick=1, fixedrange=True)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="tokens a round, bonus included", col=1)
    least, most = int(table["num_seeds"].min()), int(table["num_seeds"].max())
    trainings = "one training each" if most == 1 else f"{'up to ' * (least < most)}{most} seeds each"
    return finished(figure, title, [*table["label"].unique(), trainings, "bars: 95 % over texts, the same for all"])


def _seeds(figure: go.Figure, rows: pd.DataFrame, at: int, column: int) -> None:
    points = [(n, value) for n, values in zip(rows["num_layers"], rows["by_seed"], strict=True) if len(values) > 1 for value in values]  # fmt: skip
    if points:
        figure.add_scatter(
            x=[n for n, _ in points], y=[y for _, y in points], mode="markers", showlegend=False,
            marker={"symbol": f"{SYMBOLS[at % len(SYMBOLS)]}-open", "size": 4, "color": LINES[at % len(LINES)]},
            hovertemplate="one seed: %{y:.2f}<extra></extra>", row=1, col=column,
        )  # fmt: skip
