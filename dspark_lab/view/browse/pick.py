"""What a click says: the event under it, the call that launched it, where in the program that was; of a merged box, what it is made of."""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.trace.events import in_categories
from dspark_lab.trace.waits import wait_of
from dspark_lab.view.browse.scene import Scene
from dspark_lab.view.browse.tracks import Track
from dspark_lab.view.lanes import short
from dspark_lab.view.rows import records

MAX_TITLE = 160
"""Letters of a name in the picture; ``Picked.title`` has it whole."""
MOST = 5
"""Names told of a merged box, and frames of a launcher."""


@dataclass(frozen=True, kw_only=True)
class Picked:
    """What lies at a place of the picture.

    ``facts``: what is known, by name; ``launcher``: the call that put a device event there, its thread, and the ops or Python lines
    around it; ``arrow``: (end of the call, its track, start of the event, its track), None without.
    """

    title: str
    facts: dict[str, str]
    launcher: dict[str, str]
    track: int = -1
    event: int = -1
    arrow: tuple[int, int, int, int] | None = None

    @property
    def text(self) -> str:
        """In plain words, a line each."""
        lines = [self.title, *(f"{k}: {v}" for k, v in self.facts.items())]
        lines += ["launched by", *(f"  {k}: {v}" for k, v in self.launcher.items())] if self.launcher else []
        return "\n".join(lines)

    @property
    def html(self) -> str:
        def rows(table: dict[str, str]) -> str:
            return "".join(
                f'<span style="color:#6B7280">{html.escape(k)}</span> {html.escape(v)}&emsp;' for k, v in table.items()
            )

        launched = f"<div><b>launched by</b> {rows(self.launcher)}</div>" if self.launcher else ""
        title = self.title if len(self.title) <= MAX_TITLE else f"{self.title[: MAX_TITLE - 1]}…"
        return (
            f'<div title="{html.escape(self.title)}"><b style="overflow-wrap:anywhere">{html.escape(title)}</b></div>'
            f"<div>{rows(self.facts)}</div>{launched}"
        )


def nearest(track: Track, at: int, slack: int) -> int:
    """Position of the event at ``at`` ns, the shortest of several there, else the nearest within ``slack``; −1 where none is."""
    row = track.row
    first = int(np.searchsorted(row.reach, at - slack, side="left"))
    last = int(np.searchsorted(row.start, at + slack, side="right"))
    if first >= last:
        return -1
    start, end = row.start[first:last], row.end[first:last]
    away = np.maximum(np.maximum(start - at, at - end), 0)
    return first + int(np.lexsort((end - start, away))[0])


def event(scene: Scene, track: int, position: int) -> Picked:
    """What is known of one event of a track."""
    of = scene.tracks[track]
    source = {"device": _device, "calls": _call, "launches": _replay, "steps": _step, "events": _op}[of.source]
    start, dur = int(of.row.start[position]), int(of.row.end[position] - of.row.start[position])
    title = str(scene.names[of.row.name[position]])
    facts = {"took": _us(dur), "at": f"{start / 1e6:.4f} ms", "row": of.label}
    picked = source(scene, of, int(of.index[position]), Picked(title=title, facts=facts, launcher={}))
    return replace(picked, track=track, event=position)


def merged(scene: Scene, track: int, lo: int, hi: int) -> Picked:
    """What the events that begin between ``lo`` and ``hi`` are."""
    row = scene.tracks[track].row
    a, b = np.searchsorted(row.start, [lo, hi])
    table = pd.DataFrame({"name": row.name[a:b], "dur": row.end[a:b] - row.start[a:b]})
    by = table.groupby("name")["dur"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    share = float(np.diff(row.covered(np.array([lo, hi])))[0]) / max(hi - lo, 1)
    facts = {"in": _us(hi - lo), "busy": f"{share:.0%}", "row": scene.tracks[track].label}
    for r in records(by.head(MOST).reset_index()):
        facts[short(str(scene.names[int(r["name"])]))] = f"{int(r['size']):,} ×, {_us(r['sum'])} in all"
    more = f", {len(by) - MOST} more names" if len(by) > MOST else ""
    return Picked(
        title=f"{b - a:,} events merged here{more}; zoom in to see each", facts=facts, launcher={}, track=track
    )


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.3f} µs" if ns < 1e6 else f"{ns / 1e6:,.3f} ms"


def _device(scene: Scene, track: Track, at: int, picked: Picked) -> Picked:
    group = scene.groups[track.group]
    device, calls = group.trace.linked.device, group.trace.linked.calls
    row = records(device.iloc[[at]])[0]
    facts = {**picked.facts, "stream": str(row["stream"]), "correlation": str(row["correlation"])}
    if row["place"] >= 0:
        facts["step"] = str(group.trace.step_windows.labels[row["place"]])
    if row["bytes"] >= 0:
        facts["bytes"] = f"{row['bytes']:,}"
    if row["call"] < 0:
        return replace(picked, facts=facts, launcher={"no launch call": "in this trace"})
    call = records(calls.iloc[[row["call"]]])[0]
    lead = row["ts_ns"] - call["end_ns"]
    launcher = {
        str(call["name"]): f"on thread {call['tid']}",
        "took": _us(call["dur_ns"]),
        "ended": f"{_us(abs(lead))} {'before' if lead >= 0 else 'after'} this event began",
        **_around(group.trace, call),
    }
    tracks = {
        t.source: i
        for i, t in enumerate(scene.tracks)
        if t.group == track.group and t.source == "calls" and row["call"] in t.index
    }
    mine = next(i for i, t in enumerate(scene.tracks) if t is track)
    arrow = (
        (int(call["end_ns"]) - group.zero_ns, tracks["calls"], int(row["ts_ns"]) - group.zero_ns, mine)
        if tracks
        else None
    )
    return replace(picked, facts=facts, launcher=launcher, arrow=arrow)


def _call(scene: Scene, track: Track, at: int, picked: Picked) -> Picked:
    group = scene.groups[track.group]
    call = records(group.trace.linked.calls.iloc[[at]])[0]
    facts = {**picked.facts, "correlation": str(call["correlation"])}
    waits = group.trace.waits()
    within = int(wait_of(waits, int(call["tid"]), np.array([call["ts_ns"]]))[0])
    if within >= 0:
        mine = waits.iloc[within]
        looks = f", {mine['num_looks']} looks in {mine['dur_us']:,.0f} µs" if mine["num_looks"] else ""
        facts |= {"host waits": str(mine["kind"]).replace("_", " ") + looks, "site": str(mine["site"])}
    device = group.trace.linked.device
    own = device[(device["call"] == at).to_numpy()]
    if len(own):
        facts["put on the device"] = (
            f"{len(own)} event{'s' * (len(own) > 1)}, the first {_us(int(own['ts_ns'].min()) - call['end_ns'])} after this call ended"
        )
    return replace(
        picked,
        facts=facts | _around(group.trace, call),
        arrow=_first_arrow(scene, track, call["end_ns"] - group.zero_ns),
    )


def _first_arrow(scene: Scene, track: Track, end: int) -> tuple[int, int, int, int] | None:
    mine = next(i for i, t in enumerate(scene.tracks) if t is track)
    rows = scene.arrows[(scene.arrows[:, 0] == end) & (scene.arrows[:, 1] == mine)]
    return None if not len(rows) else (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]), int(rows[0, 3]))


def _replay(scene: Scene, track: Track, at: int, picked: Picked) -> Picked:
    row = records(scene.groups[track.group].trace.launches().iloc[[at]])[0]
    facts = {**picked.facts, "events": str(row["num_device_events"]), "step": str(row["step"])}
    launcher = {
        str(row["name"]): f"on thread {row['tid']}",
        "took": _us(row["dur_us"] * 1e3),
        "launch lead": _signed_us(row["lead_us"]),
    }
    return replace(picked, facts=facts, launcher=launcher)


def _signed_us(us: float) -> str:
    return f"{us:+,.1f} µs".replace("-", "−")


def _step(scene: Scene, track: Track, at: int, picked: Picked) -> Picked:
    row = records(scene.groups[track.group].trace.steps().iloc[[at]])[0]
    facts = {**picked.facts, "period": f"{row['period_us']:,.1f} µs", "kernels": str(row["num_kernels"])}
    facts |= {"launch lead": _signed_us(row["launch_lead_us"])} if np.isfinite(row["launch_lead_us"]) else {}
    return replace(picked, facts=facts)


def _op(scene: Scene, track: Track, at: int, picked: Picked) -> Picked:
    events = scene.groups[track.group].trace.events
    row = records(events.iloc[[at]])[0]
    return replace(picked, facts=picked.facts | _around(scene.groups[track.group].trace, row))


def _around(trace: Any, call: dict[str, Any]) -> dict[str, str]:
    """The ops and the innermost Python lines that a call of the host lies in."""
    events = trace.events
    upto = int(np.searchsorted(events["ts_ns"].to_numpy(), call["ts_ns"], side="right"))
    near = events.iloc[:upto]
    inside = near[
        (near["tid"].to_numpy() == call["tid"])
        & ((near["ts_ns"] + near["dur_ns"]).to_numpy() >= call["ts_ns"] + call["dur_ns"])
    ]
    inside = inside[inside["ts_ns"].to_numpy() < call["ts_ns"]]
    out = {}
    if len(ops := inside[in_categories(inside, ("cpu_op",))]):
        out["in"] = " › ".join(ops["name"].astype(str).tolist()[-MOST:])
    if len(frames := inside[in_categories(inside, ("python_function",))]):
        out["Python"] = " › ".join(frames["name"].astype(str).tolist()[-MOST:])
    return out
