"""`step_strip`: the same step of several arms under each other on one clock; host lane over device lane."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run
from dspark_lab.trace.span import step_number
from dspark_lab.view import doubts, lanes
from dspark_lab.view.browse.detail import Row, look
from dspark_lab.view.rows import arm_of, records
from dspark_lab.view.source import one_capture, one_rank, open_cached, trace_label
from dspark_lab.view.theme import COLOURS, FAINT, INK, TOP, fill, joined, message, signed, titled

ROW = 1.0
HOST_AT, DEVICE_AT, PITCH = 0.0, 0.76, 2.5
"""Heights of the two lanes of an arm, and from arm to arm."""
LANE = 0.62
MIN_GAP_US = 20.0
TITLE = "One step of each strategy: host over device"
TITLE_CPU = "One step of each strategy: phases over ops, no GPU"
MAX_OPS, PIXELS = 800, 2000
"""Boxes of ops an arm; over that, those of a cell are merged."""


@dataclass
class _Boxes:
    """Bars collected by (colour, faint), drawn as one plotly trace each."""

    rows: dict[tuple[str, bool], list[tuple[float, float, float, str]]] = field(default_factory=dict)

    def add(self, colour: str, at: float, start_ms: float, dur_ms: float, hover: str, *, faint: bool = False) -> None:
        self.rows.setdefault((colour, faint), []).append((start_ms, dur_ms, at, hover))


@dataclass(frozen=True, kw_only=True)
class _Arm:
    """One arm's trace with the step to show."""

    name: str
    trace: Any
    step: dict[str, Any]
    zero_ns: int
    spans: pd.DataFrame
    """`lanes.phase_spans`, all steps."""
    end_ns: int
    """Start of the next step on the device, or the end of this one."""

    def has(self, ns: float) -> bool:
        """Whether a time lies within the shown step's period."""
        return self.zero_ns <= ns < self.end_ns

    def ms(self, ns: float) -> float:
        return (float(ns) - self.zero_ns) / 1e6


def step_strip(traces: Mapping[str, Any] | Sequence[Run], *, step: int | None = None, title: str = TITLE) -> go.Figure:
    """The step ``step`` of every arm, aligned on its device start (t = 0), with what the host did before it.

    ``traces``: arm name to `Trace`, or runs with captures. Without ``step``: the one that is nearest to every arm's median
    from the third step on. Draft, verify and accept are coloured, idle time of the device is hatched, host waits are flagged.
    Without a GPU there is no device lane: phases lie over the ops that they are made of.
    """
    named, labels, missing = _named(traces)
    if not named:
        return message(title, "No captures to draw." + (f" Without one: {', '.join(missing)}." if missing else ""))
    arms, without = [], []
    step = _common(list(named.values())) if step is None else step_number(step)
    for name, trace in named.items():
        arm = _arm(name, trace, step)
        if arm is None:
            without.append(name)
        else:
            arms.append(arm)
    if not arms:
        return message(
            title, f"No step {'' if step is None else step} on a device in: {', '.join(without)}.".replace("  ", " ")
        )
    notes = [f"no step of: {', '.join(without)}"] * bool(without) + [f"no capture of: {', '.join(missing)}"] * bool(
        missing
    )
    notes += doubts.notes({a.name: a.trace for a in arms})
    return _drawn(arms, labels, notes, title)


def _named(traces: Mapping[str, Any] | Sequence[Run]) -> tuple[dict[str, Any], list[str], list[str]]:
    if isinstance(traces, Mapping):
        named = {name: one_rank(t) for name, t in traces.items()}
        return named, [trace_label(t) for t in named.values()], []
    runs = list(traces) if isinstance(traces, Sequence) else [traces]
    if not all(isinstance(r, Run) for r in runs):
        raise LabError(
            "step_strip takes runs, or traces by name; pass [run, …], or {'blocking': lab.open_trace(path), …}."
        )
    drawn = [one_capture(r) for r in runs if r.trace_paths]
    named = {arm_of(r): one_rank(open_cached(r)) for r in drawn}
    when = [_label(r) for r in runs if r.trace_paths]
    return named, when, [arm_of(r) for r in runs if not r.trace_paths]


def _label(run: Run) -> str:
    """The label line of a run's capture: always profiled."""
    world = run.config.parallel.world_size
    ranks = f", rank 0 of {world}" if world > 1 else ""
    return (
        f"{run.shown_source} {str(run.environment.get('recorded_at', ''))[:10]} on {run.device_name}, profiled{ranks}"
    )


def _common(traces: list[Any]) -> int | None:
    """The step, third or later and not the last, that all arms have and that lies nearest to each one's median period."""
    far: pd.Series | None = None
    for trace in traces:
        rows = trace.steps()
        rows = rows[rows["period_us"].notna()]
        rows = rows.iloc[2:-1] if len(rows) > 4 else rows
        off = (rows["period_us"] / rows["period_us"].median() - 1).abs().set_axis(rows["step"])
        off = off[~off.index.duplicated()]
        far = off if far is None else pd.concat([far, off], axis=1, join="inner").max(axis=1)
    return None if far is None or not len(far) else int(far.index[int(far.to_numpy().argmin())])


def _arm(name: str, trace: Any, step: int | None) -> _Arm | None:
    steps = trace.steps()
    start = "host_start_ns" if trace.is_cpu_only else "device_start_ns"
    rows = steps[(steps[start] > 0) & steps["period_us"].notna()]
    rows = rows[rows["step"] == step] if step is not None else rows.iloc[-1:]
    if not len(rows):
        return None
    row = rows.iloc[0].to_dict()
    end_ns = int(row[start] + row["period_us"] * 1e3)
    return _Arm(
        name=name, trace=trace, step=row, spans=lanes.phase_spans(trace), zero_ns=int(row[start]), end_ns=end_ns
    )


def _drawn(arms: list[_Arm], labels: list[str], notes: list[str], title: str) -> go.Figure:
    figure, boxes = go.Figure(), _Boxes()
    lo, hi = _range(arms)
    for i, arm in enumerate(arms):
        lower = _op_lane if arm.trace.is_cpu_only else _device_lane
        lower(boxes, arm, i * PITCH + DEVICE_AT, lo, hi)
        _host_lane(boxes, arm, i * PITCH + HOST_AT, lo, hi)
        _marks(figure, arm, i * PITCH, lo, hi)
    cpu = all(a.trace.is_cpu_only for a in arms)
    _bars(figure, boxes, cpu=cpu)
    _row_labels(figure, arms)
    where = "host" if cpu else "device"
    figure.add_vline(x=0, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text=f"ms since the step began on the {where} (t = 0)", range=[lo, hi], zeroline=False)
    bottom = (len(arms) - 1) * PITCH + DEVICE_AT + 0.85
    figure.update_yaxes(range=[bottom, -0.8], visible=False, fixedrange=True)
    figure.update_layout(barmode="overlay", bargap=0, margin={"l": 186, "t": TOP, "b": 96})
    if where == "host" and title == TITLE:
        title = TITLE_CPU
    return titled(figure, title, " · ".join([joined(labels), *notes]), height=int(146 + 98 * len(arms)))


def _range(arms: list[_Arm]) -> tuple[float, float]:
    """From just before the earliest launch of the shown steps to just after the last period's end, in ms."""
    firsts = []
    for arm in arms:
        mine = arm.spans[arm.spans["step"] == arm.step["step"]]
        waits = arm.trace.waits()
        held = waits[(waits["step"] == arm.step["step"]) & (waits["kind"] != "event_wait")]
        firsts.append(arm.ms(min([arm.zero_ns, *mine["host_start_ns"].tolist(), *held["ts_ns"].tolist()])))
    hi = max(arm.ms(arm.end_ns) for arm in arms)
    lo = max(min(firsts), -2.5 * hi)
    pad = 0.03 * (hi - lo)
    return lo - pad, hi + 2 * pad


def _device_lane(boxes: _Boxes, arm: _Arm, at: float, lo: float, hi: float) -> None:
    """Phases as one box each, what belongs to none as small boxes, idle time hatched."""
    shown = arm.spans[arm.spans["device_start_ns"] > 0]
    for s in records(shown):
        start, end = arm.ms(s["device_start_ns"]), arm.ms(s["device_end_ns"])
        if end > lo and start < hi:
            mine = s["step"] == arm.step["step"]
            boxes.add(
                s["phase"],
                at,
                start,
                end - start,
                f"{arm.name}, step {s['step']}: {s['phase']} on the device",
                faint=not mine,
            )
    work = lanes.device_work(arm.trace)
    from_ns, to_ns = arm.zero_ns + lo * 1e6, arm.zero_ns + hi * 1e6
    work = work[(work["start_ns"] + work["dur_ns"] > from_ns) & (work["start_ns"] < to_ns)]
    for b in records(_outside(work, shown)):
        boxes.add(b["colour"], at, arm.ms(b["start_ns"]), b["dur_ns"] / 1e6, f"{arm.name}: {b['name']}")
    for start, end in lanes.gaps(work, int(from_ns), int(to_ns), over_ns=MIN_GAP_US * 1e3):
        boxes.add(
            "idle", at, arm.ms(start), (end - start) / 1e6, f"{arm.name}: the device is idle", faint=not arm.has(start)
        )


def _op_lane(boxes: _Boxes, arm: _Arm, at: float, lo: float, hi: float) -> None:
    """What the phases are made of, where there is no device."""
    events = arm.trace.events
    from_ns, to_ns = arm.zero_ns + lo * 1e6, arm.zero_ns + hi * 1e6
    ops = lanes.op_boxes(events[(events["ts_ns"] < to_ns) & (events["ts_ns"] + events["dur_ns"] > from_ns)])
    names, colours = ops["name"].tolist(), ("compute", "communication")
    start, talk = ops["start_ns"].to_numpy(), (ops["colour"] == "communication").to_numpy(dtype=np.int8)
    order = np.argsort(start, kind="stable")
    row = Row(start[order], (start + ops["dur_ns"].to_numpy())[order], talk[order], np.arange(len(ops))[order])
    shown, _ = look([row], int(from_ns), int(to_ns), pixels=PIXELS, limit=MAX_OPS)
    for a, b, c, name, count in zip(shown.start, shown.end, shown.colour, shown.name, shown.count, strict=True):
        said = names[name] if name >= 0 else f"{count} ops merged"
        boxes.add(colours[c], at, arm.ms(a), (b - a) / 1e6, f"{arm.name}: {said}", faint=not arm.has(a))


def _outside(work: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """Device events that start in none of the phases."""
    start = work["start_ns"].to_numpy()
    inside = np.zeros(len(work), dtype=bool)
    for lo, hi in zip(spans["device_start_ns"], spans["device_end_ns"], strict=True):
        inside |= (start >= lo) & (start < hi)
    return work[~inside]


def _host_lane(boxes: _Boxes, arm: _Arm, at: float, lo: float, hi: float) -> None:
    """Step frames, launches in the colour of what they launch, waits hatched."""
    trace, focus = arm.trace, arm.step["step"]
    for s in records(trace.steps()):
        start, end = arm.ms(s["host_start_ns"]), arm.ms(s["host_end_ns"])
        if end > lo and start < hi:
            text = f"{arm.name}, step {s['step']}: host code"
            boxes.add("host", at, start, end - start, text, faint=s["step"] != focus)
    for s in records(arm.spans):
        start, end = arm.ms(s["host_start_ns"]), arm.ms(s["host_end_ns"])
        if end > lo and start < hi:
            text = (
                f"{arm.name}, step {s['step']}: host {'launches' if s['device_start_ns'] > 0 else 'runs'} {s['phase']}"
            )
            boxes.add(s["phase"], at, start, end - start, text, faint=s["step"] != focus)
    for w in records(trace.waits()):
        start, dur = arm.ms(w["ts_ns"]), w["dur_us"] / 1e3
        if start + dur > lo and start < hi and dur > 0.001:
            text = f"{arm.name}, step {w['step']}: the host waits in {w['name']} ({w['kind']})<br>{site(w)}"
            boxes.add(
                "event wait" if w["kind"] == "event_wait" else "wait", at, start, dur, text, faint=w["step"] != focus
            )


def site(wait: dict[str, Any]) -> str:
    """Where a wait stands in the program; without stacks its ordinal among the step's calls."""
    where = str(wait.get("site") or "")
    return (
        where
        if where and not where.startswith(f"{wait['name']} #")
        else f"{where or wait['name']} of the step (no stacks recorded)"
    )


def _brief(where: str) -> str:
    """A chain of ops by its ends, so that it fits over a lane; the whole of it stands in the hover text."""
    chain = where.split(" > ")
    return where if len(chain) < 3 else f"{chain[0]} > … > {chain[-1]}"


def _marks(figure: go.Figure, arm: _Arm, top: float, lo: float, hi: float) -> None:
    """The end of the period, the flag of the longest wait, the line from launch to start."""
    end = arm.ms(arm.end_ns)
    figure.add_shape(
        type="line", x0=end, x1=end, y0=top - 0.35, y1=top + DEVICE_AT + 0.4, line={"color": INK, "width": 2}
    )
    figure.add_annotation(
        x=end, y=top + DEVICE_AT + 0.56, text=f"<b>{end:.2f} ms</b>", showarrow=False, font={"size": 11}
    )
    _gap_label(figure, arm, top)
    waits = arm.trace.waits()
    mine = waits[(waits["step"] == arm.step["step"]) & waits["kind"].isin(["sync", "blocking_copy"])]
    if len(mine):
        w = mine.loc[mine["dur_us"].idxmax()].to_dict()
        x = max(min(arm.ms(w["ts_ns"]) + w["dur_us"] / 2e3, hi), lo)
        figure.add_annotation(
            x=x, y=top - LANE / 2, text=f"<b>⚑ {w['name']}</b> {w['dur_us'] / 1e3:.2f} ms · {_brief(site(w))}", showarrow=True, arrowhead=0,
            ax=0, ay=-13, arrowcolor=COLOURS["wait"], font={"color": "#B34700", "size": 11.5}, bgcolor="rgba(255,255,255,0.85)",
        )  # fmt: skip
    first = arm.spans[(arm.spans["step"] == arm.step["step"]) & (arm.spans["device_start_ns"] > 0)].head(1)
    for s in records(first):
        figure.add_shape(
            type="line", x0=arm.ms(s["host_end_ns"]), y0=top + LANE / 2, x1=arm.ms(s["device_start_ns"]), y1=top + DEVICE_AT - LANE / 2,
            line={"color": INK, "width": 1.5},
        )  # fmt: skip


def _gap_label(figure: go.Figure, arm: _Arm, top: float) -> None:
    """The idle time of the device within the shown step, in words under its largest gap."""
    idle = lanes.gaps(lanes.device_work(arm.trace), arm.zero_ns, arm.end_ns, over_ns=MIN_GAP_US * 1e3)
    if not idle:
        return
    start, end = max(idle, key=lambda g: g[1] - g[0])
    total = sum(b - a for a, b in idle) / 1e6
    figure.add_annotation(x=arm.ms((start + end) / 2), y=top + DEVICE_AT + 0.56, text=f"<b>device idle {total:.2f} ms</b>", showarrow=False,
                          font={"size": 11, "color": COLOURS["idle"]}, bgcolor="rgba(255,255,255,0.85)")  # fmt: skip


def _bars(figure: go.Figure, boxes: _Boxes, *, cpu: bool) -> None:
    """One trace a colour, and one for what belongs to other steps; waits and gaps last, so that they lie on top."""
    order = ["host", "idle", "draft", "verify", "accept", "compute", "communication", "copy", "event wait", "wait"]
    seen: set[str] = set()
    names = {
        "idle": "device idle",
        "wait": "host blocked",
        "event wait": "host waits for an old event",
        "host": "host code",
        "compute": "ops" if cpu else "compute",
    }
    for colour in order:
        for faint in (True, False):
            rows = boxes.rows.get((colour, faint))
            if not rows:
                continue
            start, dur, at, hover = (list(x) for x in zip(*rows, strict=True))
            figure.add_bar(
                x=dur, base=start, y=at, orientation="h", width=LANE, marker=fill(colour) if len(dur) < 100 else {"color": COLOURS[colour], "line": {"width": 0}}, opacity=0.35 if faint else 1.0,
                name=names.get(colour, colour), legendgroup=colour, showlegend=colour not in seen and not faint and (cpu or colour not in ("compute", "copy", "communication")),
                hovertext=hover, customdata=[d * 1e3 for d in dur], hovertemplate="%{hovertext}<br>%{customdata:,.1f} µs<extra></extra>",
            )  # fmt: skip
            seen |= set() if faint else {colour}


def _row_labels(figure: go.Figure, arms: list[_Arm]) -> None:
    for i, arm in enumerate(arms):
        lead = arm.step.get("launch_lead_us")
        said = f"step {arm.step['step']}: {arm.step['period_us'] / 1e3:.2f} ms"
        if why := doubts.doubtful_steps(arm.trace).get(int(arm.step["step"])):
            said += f"<br><span style='color:#B34700'>⚠ {textwrap.shorten(why, 30, placeholder='…')}</span>"
        if lead is not None and not pd.isna(lead):
            said += f"<br>launch lead {signed(lead / 1e3, 2)} ms"
        figure.add_annotation(
            x=0, xref="paper", xshift=-180, y=i * PITCH + DEVICE_AT / 2, xanchor="left", align="left", showarrow=False,
            text=f"<b style='font-size:14px'>{arm.name}</b><br><span style='color:{FAINT}'>{said}</span>",
        )  # fmt: skip
        upper, lower = ("phases", "ops") if arm.trace.is_cpu_only else ("host", "device")
        for lane, at in ((upper, HOST_AT), (lower, DEVICE_AT)):
            figure.add_annotation(x=0, xref="paper", xshift=-4, y=i * PITCH + at, xanchor="right", text=lane, showarrow=False,
                                  font={"size": 10, "color": FAINT})  # fmt: skip
