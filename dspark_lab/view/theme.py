"""One look for every figure: the template ``dspark``, and colours and strokes that mean one thing everywhere.

Colours are Okabe and Ito's, told apart with any kind of colour vision, on white and on a dark page (a figure is a white card).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

COLOURS: dict[str, str] = {
    "compute": "#0072B2",
    "communication": "#CC79A7",
    "copy": "#E69F00",
    "idle": "#4B5563",
    "host": "#7A869A",
    "wait": "#D55E00",
    "draft": "#009E73",
    "verify": "#56B4E9",
    "accept": "#F0E442",
}
TOP = 54
"""Margin above the plot, px: title and one label line."""
INK, FAINT, GRID = "#1F2937", "#6B7280", "#E5E7EB"
HATCHED = {"wait": "/", "event wait": ".", "idle": "x"}
"""What is no work is hatched; a wait for an event of an earlier step, which running ahead needs, is dotted."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

_AXIS: dict[str, Any] = {
    "gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "ticks": "outside", "tickcolor": GRID,
    "automargin": True, "title": {"standoff": 8},
}  # fmt: skip


def template() -> go.layout.Template:
    """The template ``dspark``, as it is registered."""
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 12, "color": INK},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "colorway": [COLOURS[k] for k in ("compute", "draft", "copy", "communication", "verify", "wait", "host")],
            "title": {"font": {"size": 15}, "x": 0.012, "xref": "container", "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"t": 12},
                      "yref": "container"},
            "margin": {"l": 60, "r": 34, "t": TOP, "b": 44},
            "xaxis": _AXIS,
            "yaxis": _AXIS,
            "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
            "legend": {"orientation": "h", "x": 0.01, "xref": "container", "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 11}},
            "bargap": 0.35,
            "modebar": {"orientation": "v", "bgcolor": "rgba(255,255,255,0)", "color": "#9CA3AF", "activecolor": INK},
        }
    )  # fmt: skip


pio.templates["dspark"] = template()


def fill(category: str) -> dict[str, Any]:
    """Marker of a bar of ``category``: its colour, hatched where it is no work."""
    colour = COLOURS["wait" if category == "event wait" else category]
    if category in HATCHED:
        return {"color": "white", "line": {"color": colour, "width": 1},
                "pattern": {"shape": HATCHED[category], "fgcolor": colour, "bgcolor": "white", "size": 5, "solidity": 0.3}}  # fmt: skip
    return {"color": colour, "line": {"color": "rgba(0,0,0,0.35)" if category == "accept" else "white", "width": 0.4}}


def stroke(source: str) -> dict[str, Any]:
    """How a point or bar shows where its number came from: measured solid, recorded outlined, simulated dashed."""
    if source == "measured":
        return {"symbol": "circle", "dash": "solid", "filled": True}
    if source == "recorded":
        return {"symbol": "circle-open", "dash": "solid", "filled": False}
    return {"symbol": "circle-open-dot", "dash": "dash", "filled": False}


def titled(figure: go.Figure, title: str, label: str, *, height: int = 360) -> go.Figure:
    """``figure`` with title, label line (source, device, date, profiled or not) and template."""
    lines = textwrap.wrap(label, 100)
    line = f"<br><span style='font-size:11.5px;color:{FAINT}'>{'<br>'.join(lines)}</span>" if label else ""
    layout: Any = figure.layout
    figure.update_layout(margin={"t": (layout.margin.t or TOP) + 15 * max(len(lines) - 1, 0)})
    pad = {"t": 22 if lines else 10}  # plotly drops the height of the first line where there are several
    figure.update_layout(
        template="dspark", height=height, title={"text": f"<b>{title}</b>{line}", "pad": pad}, dragmode="pan"
    )
    return figure


def message(title: str, text: str, *, height: int = 240) -> go.Figure:
    """A figure that says in words why there is nothing to draw."""
    figure = titled(go.Figure(), title, "", height=height)
    figure.add_annotation(
        text="<br>".join(textwrap.wrap(text, 64)),
        showarrow=False,
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
        font={"size": 14, "color": FAINT},
    )
    figure.update_layout(margin={"l": 20, "r": 20, "t": 62, "b": 20})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, automargin=False)
    return figure


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign, and a true minus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def joined(labels: Iterable[str]) -> str:
    """The labels of several runs as one line, each said once."""
    return "; ".join(dict.fromkeys(label for label in labels if label))
