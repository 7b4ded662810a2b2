"""Waiting told apart from losing: a wait of the host costs only what the device ran dry for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.device_line import DeviceLine, lines
from dspark_lab.trace import open_trace
from dspark_lab.trace.polls import looks_of

LOST_COLUMNS = (
    "rank",
    "step",
    "kind",
    "name",
    "site",
    "ts_ns",
    "dur_us",
    "lost_us",
    "age_steps",
    "age_source",
    "profiled",
)
SITE_COLUMNS = (
    "rank",
    "kind",
    "name",
    "site",
    "num_waits",
    "wait_us_per_step",
    "lost_us_per_step",
    "age_steps",
    "profiled",
)
#: A wait that lasted longer than this waited for something; below, it is the cost of the call.
WAITED_NS = 30_000
#: The host comes back from a wait within this after the event it waited for.
_RETURN_NS = 40_000


@dataclass(frozen=True)
class Charged:
    """Of each gap that the device spent waiting for the host, what is owed to which wait.

    gap, wait, ns: a row a charge; ``gap`` indexes the line, ``wait`` the rows of ``trace.waits()`` (−1: host work that no wait held up).
    """

    gap: np.ndarray
    wait: np.ndarray
    ns: np.ndarray


def charge(line: DeviceLine) -> Charged:
    """Who owes the time in which the device was dry.

    When the device ran dry while the host stood in a wait, the wait held the host back, and what the device then lacks until launches are
    queued ahead again is owed to it — but never more than the wait lasted, since without it the host would have come that much earlier.
    Where several waits follow each other before the host is ahead again, the earlier pays first. The rest is host work.
    """
    waits = line.trace.waits()
    w_start = waits["ts_ns"].to_numpy()
    w_end = w_start + (waits["dur_us"].to_numpy() * 1000).round().astype(np.int64)
    at = np.flatnonzero(line.host_ns > 0)
    if not len(at):
        none = np.empty(0, dtype=np.int64)
        return Charged(gap=none, wait=none, ns=none)
    # the host is ahead again when a whole launch was there in time; late nodes of a launch that came late itself are no sign of it
    ahead = np.cumsum(line.queued & (line.call >= 0) & ~line.same_launch)
    reach = np.maximum.accumulate(w_end) if len(w_end) else w_end
    rows: list[tuple[int, int, int]] = []
    owing: list[list[int]] = []  # [wait, budget], the oldest first
    episode = -1
    for i in at.tolist():
        if int(ahead[i]) != episode:
            episode, owing = int(ahead[i]), []
        dry, left = int(line.prev_end[i]), int(line.host_ns[i])
        low, high = int(np.searchsorted(reach, dry)), int(np.searchsorted(w_start, dry + left))
        for w in range(low, high):
            if w_end[w] < dry or any(o[0] == w for o in owing):
                continue
            stood = int(w_start[w]) <= dry
            budget = int(w_end[w] - w_start[w]) if stood else int(min(w_end[w], dry + left) - w_start[w])
            owing.append([w, budget])
        for owed in owing:
            paid = min(owed[1], left)
            if paid > 0:
                rows.append((i, owed[0], paid))
                owed[1] -= paid
                left -= paid
        if left > 0:
            rows.append((i, -1, left))
    gap, wait, ns = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    return Charged(gap=gap, wait=wait, ns=ns)


def lost(source: Any, *, comm_patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """One row a wait of the host, with what it cost.

    Columns: rank, step (−1 outside), kind, name, site, ts_ns, dur_us (how long the host stood), lost_us (how long the device was dry
    for it; see `charge`), age_steps (how many steps back the awaited event was recorded; NaN unknown) and age_source (``waited``: seen
    from when it came back; ``first wait``: from the steps before the first wait; ``at least``: only a lower bound), profiled.
    """
    parts = []
    for rank, line in lines(open_trace(source), comm_patterns).items():
        waits = line.trace.waits()
        owed = charge(line)
        cost = np.bincount(owed.wait[owed.wait >= 0], weights=owed.ns[owed.wait >= 0], minlength=len(waits)) / 1000
        age, how = event_age(line)
        is_event = (waits["kind"] == "event_wait").to_numpy()
        waits = waits.assign(
            rank=rank,
            lost_us=cost if len(waits) else np.empty(0),
            age_steps=np.where(is_event, age, np.nan),
            age_source=np.where(is_event, how, ""),
            profiled=line.trace.profiled,
        )
        parts.append(waits[list(LOST_COLUMNS)])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(LOST_COLUMNS))


def lost_by_site(source: Any, *, comm_patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """One row a site and kind of wait: num_waits, wait and loss a step (means over all steps of the capture), the greatest loss first."""
    opened = open_trace(source)
    rows = lost(opened, comm_patterns=comm_patterns)
    rows = rows[(rows["step"] >= 0).to_numpy()]
    counts = {r: len(x.trace.step_windows) for r, x in lines(opened, comm_patterns).items()}
    by = rows.groupby(["rank", "kind", "name", "site"], sort=False)
    table = by.agg(
        num_waits=("dur_us", "size"), wait=("dur_us", "sum"), loss=("lost_us", "sum"), age_steps=("age_steps", "median")
    ).reset_index()
    steps = table["rank"].map(counts).to_numpy(dtype=float)
    table["wait_us_per_step"], table["lost_us_per_step"] = table["wait"] / steps, table["loss"] / steps
    table["profiled"] = True
    return table.sort_values("lost_us_per_step", ascending=False, ignore_index=True)[list(SITE_COLUMNS)]


def records(line: DeviceLine) -> tuple[np.ndarray, np.ndarray]:
    """(host time of each event record, end of the device work enqueued before it), ns, in order of time."""
    calls = line.trace.linked.calls
    names = calls["name"].astype(str)
    mine = names.str.contains(r"EventRecord", regex=True).to_numpy() & (calls["place"] >= 0).to_numpy()
    at = calls["ts_ns"].to_numpy()[mine]
    order = np.argsort(line.call_start, kind="stable")
    launched, latest = line.call_start[order], np.maximum.accumulate(line.end[order]) if len(line) else line.end
    upto = np.searchsorted(launched, at, side="right") - 1
    ends = np.where(upto >= 0, latest[np.maximum(upto, 0)], -1) if len(line) else np.full(len(at), -1)
    return at, ends


def event_age(line: DeviceLine) -> tuple[float, str]:
    """How many records back an event wait goes, for a trace that does not say which event is awaited; (NaN, "") where unknown.

    A wait that held the host came back when one record's work was done: the record whose end lies just before; of a wait by polling, the
    one that ended between its last look but one and its last. Where none held it, a
    capture whose first steps record and do not wait tells by them; else the least age whose work was done at each return.
    """
    waits = line.trace.waits()
    mine = ((waits["kind"] == "event_wait") & (waits["step"] >= 0)).to_numpy()
    rows = waits[mine]
    at, ends = records(line)
    if not len(rows) or not len(at):
        return float("nan"), ""
    back = rows["ts_ns"].to_numpy() + (rows["dur_us"].to_numpy() * 1000).round().astype(np.int64)
    unseen = back - _RETURN_NS  # what was done by then, it would have come back for earlier
    linked = line.trace.linked
    looks, asked = looks_of(waits, linked.polls, linked.calls), linked.calls["ts_ns"].to_numpy()
    for k, w in enumerate(np.flatnonzero(mine).tolist()):
        if w in looks:
            unseen[k] = asked[looks[w][-2]] if len(looks[w]) > 1 else back[k]
    newest = np.searchsorted(at, rows["ts_ns"].to_numpy(), side="right") - 1
    held = (rows["dur_us"].to_numpy() * 1000 > WAITED_NS) & (newest >= 0)
    place = {int(s): k for k, s in enumerate(line.trace.step_windows.labels)}
    of_record = line.trace.step_windows.of(at)
    ages = []
    for k in np.flatnonzero(held):
        seen = ends[: newest[k] + 1]
        hit = np.flatnonzero((seen <= back[k]) & (seen > unseen[k]))
        if len(hit):
            ages.append(place[int(rows["step"].iloc[k])] - int(of_record[hit[-1]]))
    if ages:
        return float(pd.Series(ages).mode().iloc[0]), "waited"
    first = place[int(rows["step"].iloc[0])]
    if first > 0 and set(range(first)) <= set(of_record.tolist()):
        return float(first), "first wait"
    known = newest >= 0
    least = 0
    for k in np.flatnonzero(known):
        done = np.flatnonzero(ends[: newest[k] + 1] <= back[k])
        if len(done):
            least = max(least, place[int(rows["step"].iloc[k])] - int(of_record[done[-1]]))
    return float(least), "at least"
