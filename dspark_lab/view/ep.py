"""Expert parallelism in pictures: `ep_lanes`, `expert_heatmap`, `ep_sweep`, `ep_traffic`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspark_lab.analysis.ep import expert_load, imbalance_of, traffic_of
from dspark_lab.analysis.intervals import step_interval
from dspark_lab.errors import unknown
from dspark_lab.runs.record import Run, as_runs, one_run
from dspark_lab.view.rows import arm_of
from dspark_lab.view.theme import COLOURS, HATCHED, TOP, joined, message, stroke, titled

KINDS = {
    "wait": COLOURS["wait"],
    "dispatch": COLOURS["communication"],
    "experts": COLOURS["compute"],
    "combine": COLOURS["copy"],
}
SHOWN_EXCHANGES = 6
"""Layers drawn in lanes: a picture of all of a large model's would show nothing."""


def ep_lanes(run: Run, *, title: str = "Ranks side by side") -> go.Figure:
    """A lane a rank, on one clock that starts when the ranks first met: waiting for the slowest, dispatch, experts, combine."""
    run = one_run(run)
    parts = [d for d in sorted(run.ep, key=lambda d: d["rank"]) if d.get("exchange", {}).get("spans")]
    if not parts:
        return message(title, "This run did not time its exchanges: measure one with lab.sweep at ep_size above 1.")
    figure, spans_a_layer = go.Figure(), 5  # wait, dispatch, experts, wait, combine
    shift = _shifts(parts)
    for kind, colour in KINDS.items():
        x, base, y, text = [], [], [], []
        for part in parts:
            for name, start, us in part["exchange"]["spans"][1 : spans_a_layer * SHOWN_EXCHANGES]:
                if name == kind:
                    x, base, y = [*x, us], [*base, start + shift[part["rank"]]], [*y, f"rank {part['rank']}"]
                    text.append(f"{kind} {us:.0f} µs")
        figure.add_bar(
            x=x, base=base, y=y, orientation="h", name=kind, hovertext=text, hoverinfo="text+y",
            marker={"color": colour, "line": {"width": 0}, "pattern": {"shape": HATCHED.get(kind, "")}},
        )  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.3)
    figure.update_xaxes(title_text="µs since the ranks first met")
    figure.update_yaxes(autorange="reversed", title_text="")
    return titled(figure, title, f"{run.name} · eager; ranks meet before each exchange · {run.label}")


def _shifts(parts: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By rank, µs from its machine's zero to its own: ranks of a machine share a clock, machines have met when they first met."""
    first: dict[int, float] = {}
    for part in parts:
        e = part["exchange"]
        node = e.get("node", 0)
        first[node] = min(first.get(node, math.inf), e.get("origin_us", 0.0))
    return {p["rank"]: p["exchange"].get("origin_us", 0.0) - first[p["exchange"].get("node", 0)] for p in parts}


WHO, MOST_MAPS = ("target", "drafter"), 6


def expert_heatmap(
    runs: Run | Sequence[Run], *, who: str = "target", title: str = "Rows by layer and expert"
) -> go.Figure:
    """A map a run, before and after a placement say: columns are experts in the order in which ranks hold them.

    Colour is an expert's rows over the mean of its layer's experts; lines part the ranks.
    """
    if who not in WHO:
        raise unknown("who", who, WHO)
    runs = as_runs(runs)
    counted = [r for r in runs if any(who in d and "experts" in d[who] for d in r.ep)]
    if not counted:
        return message(title, "No run here counted its expert load: lab.sweep does.")
    if len(counted) > MOST_MAPS:
        return message(title, f"{len(counted)} runs are too many for one picture of maps: give at most {MOST_MAPS}.")
    figure = make_subplots(
        rows=len(counted),
        cols=1,
        subplot_titles=[_placed(r, who) for r in counted],
        vertical_spacing=min(0.16, 0.5 / len(counted)),
    )
    top = max(float((_held(r, who)[0]).max()) for r in counted)
    for row, run in enumerate(counted, start=1):
        z, names, width = _held(run, who)
        figure.add_heatmap(
            z=z, customdata=names, coloraxis="coloraxis", row=row, col=1, xgap=1, ygap=1,
            hovertemplate="layer %{y}, expert %{customdata}: %{z:.2f} × the mean<extra></extra>",
        )  # fmt: skip
        for edge in range(width, z.shape[1], width):
            figure.add_vline(x=edge - 0.5, line={"color": "white", "width": 4}, row=row, col=1)  # pyright: ignore[reportArgumentType]
        ranks = z.shape[1] // width
        ticks = [width * r + (width - 1) / 2 for r in range(ranks)]
        figure.update_xaxes(tickvals=ticks, ticktext=[f"rank {r}" for r in range(ranks)], row=row, col=1)
        figure.update_yaxes(title_text="layer", dtick=max(z.shape[0] // 6, 1), row=row, col=1)
    figure.update_layout(
        coloraxis={
            "colorscale": "Cividis",
            "cmin": 0,
            "cmax": top,
            "colorbar": {"title": {"text": "× mean"}, "thickness": 12},
        }
    )
    figure.update_layout(margin={"t": TOP + 18})  # each map has a line of its own above it
    return titled(figure, title, joined(r.label for r in counted))


def _held(run: Run, who: str) -> tuple[np.ndarray, np.ndarray, int]:
    """[layers, experts held] rows over the layer's mean in order of rank, logical ids alike, and experts of a rank."""
    parts = [d[who] for d in sorted(run.ep, key=lambda d: d["rank"]) if who in d]
    rows = np.concatenate([np.array(part["rows"], dtype=float) for part in parts], axis=1)
    names = np.concatenate([np.array(part["experts"]) for part in parts], axis=1)
    mean = rows.sum(axis=1, keepdims=True) / expert_load(run, who).shape[1]
    return np.divide(rows, mean, out=np.zeros_like(rows), where=mean > 0), names, len(parts[0]["rows"][0])


def _placed(run: Run, who: str) -> str:
    p, even = run.config.parallel, imbalance_of(run, who)
    redundant = f", {p.num_redundant_experts} redundant" if p.num_redundant_experts else ""
    said = f": imbalance {even.mean:.3f}, bound {even.bound:.3f}" if even else ""
    return f"<span style='font-size:12px'>{p.placement}{redundant} over {p.ep_size} rank{'s' * (p.ep_size > 1)}{said}</span>"


def ep_sweep(runs: Sequence[Run], *, title: str = "Step by EP size") -> go.Figure:
    """Median step of each run with its 95 % interval, against EP size; a line for each strategy, dispatcher, placement and batch size."""
    arms = [r for r in as_runs(runs) if r.role == "arm" and not math.isnan(r.step_ms_p50)]
    if not arms:
        return message(title, "No run here has unprofiled steps.")
    figure, lines = go.Figure(), _lines(arms)
    colours = [COLOURS[k] for k in ("compute", "wait", "draft", "communication", "copy", "verify", "host")]
    sizes = sorted({r.config.parallel.ep_size for r in arms})
    for k, (name, members) in enumerate(lines.items()):
        members = sorted(members, key=lambda r: r.config.parallel.ep_size)
        spread = [step_interval(r) for r in members]
        mids = [r.step_ms_p50 for r in members]
        at = [sizes.index(r.config.parallel.ep_size) + 0.06 * (k - (len(lines) - 1) / 2) for r in members]
        figure.add_scatter(
            x=at, y=mids, name=name, mode="lines+markers", line={"color": colours[k % len(colours)], "width": 2},
            marker={"size": 8, "symbol": stroke(members[0].shown_source)["symbol"]},
            error_y={
                "type": "data", "symmetric": False, "thickness": 1.5,
                "array": [max(i.high - m, 0) if i.known else 0 for i, m in zip(spread, mids, strict=True)],
                "arrayminus": [max(m - i.low, 0) if i.known else 0 for i, m in zip(spread, mids, strict=True)],
            },
            customdata=[[r.name, i.low, i.high, i.n] for r, i in zip(members, spread, strict=True)],
            hovertemplate="%{customdata[0]}<br>%{y:.3f} ms, 95 % %{customdata[1]:.3f} to %{customdata[2]:.3f}"
            " over %{customdata[3]} replicates<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="EP size", tickvals=list(range(len(sizes))), ticktext=[str(s) for s in sizes])
    figure.update_yaxes(title_text="step, ms", rangemode="tozero")
    figure.update_layout(showlegend=True)
    return titled(figure, title, f"maximum over ranks · bars: 95 % intervals · {joined(r.label for r in arms)}")


def _lines(arms: Sequence[Run]) -> dict[str, list[Run]]:
    """By what is said of a line; runs at EP 1, which have no dispatcher, begin each line of their batch size and code path."""
    one = [r for r in arms if r.config.parallel.ep_size == 1]
    many = [r for r in arms if r.config.parallel.ep_size > 1] or one
    sizes, strategies = len({r.config.engine.batch_size for r in arms}) > 1, len({arm_of(r) for r in many}) > 1
    alike = {r.config.parallel.dispatcher for r in many if r.config.parallel.attn_dp == 1}
    lines: dict[str, list[Run]] = {}
    for r in sorted(many, key=lambda r: r.config.engine.batch_size):  # as numbers: names have batch 32 before 8
        p, e = r.config.parallel, r.config.engine
        parts = [arm_of(r)] * strategies
        if p.ep_size > 1:
            parts += [p.dispatcher, p.placement]
            parts += ["attention DP"] * (p.attn_dp == p.ep_size and p.dispatcher in alike)
            parts += [f"{p.num_redundant_experts} redundant"] * (p.num_redundant_experts > 0)
        parts += [f"batch {e.batch_size}"] * sizes + [f"attn_dp {p.attn_dp}"] * (p.attn_dp not in (1, p.ep_size))
        lines.setdefault(", ".join(parts) or "EP 1", []).append(r)
    if many is not one:
        for members in lines.values():
            members += _begin(members[0], one)
    return lines


def _begin(run: Run, one: Sequence[Run]) -> list[Run]:
    """Of the runs at EP 1, the one that ``run`` would be there: of its strategy, or of one that builds no scalar at EP 1 either."""
    e = run.config.engine
    same = [r for r in one if r.config.engine.batch_size == e.batch_size]
    alike = [r for r in same if r.config.engine.how.builds(False) == e.how.builds(False) is False]
    return ([r for r in same if r.config.engine.alloc == e.alloc] or alike)[:1]


def ep_traffic(run: Run, *, who: str = "target", title: str = "Rows from rank to rank") -> go.Figure:
    """Who sent how many rows to whom, over all layers; the diagonal stayed at home."""
    run = one_run(run)
    sent = traffic_of(run, who)
    if sent is None:
        return message(title, "Only dispatcher='all_to_all' sends different rows to different ranks.")
    ranks = [f"rank {r}" for r in range(len(sent))]
    figure = go.Figure(go.Heatmap(z=sent, x=ranks, y=ranks, colorscale="Cividis", texttemplate="%{z}", xgap=2, ygap=2))
    figure.update_xaxes(title_text="to")
    figure.update_yaxes(title_text="from", autorange="reversed")
    return titled(figure, title, f"{run.name} · {run.label}")
