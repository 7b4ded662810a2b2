"""What a trace lacks, what was mended in it, and which figures it therefore does not give."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.trace.clock import clock_jumps
from dspark_lab.trace.decode import ReadLog
from dspark_lab.trace.launches import Linked
from dspark_lab.trace.periods import overruns, sound_ends
from dspark_lab.trace.steps import StepWindows

DEVICE_FIGURES = ("step_us_p50", "step_us_mean", "gpu_span_us_per_step", "kernels_per_step", "launch_lead_us_p50")
HOST_FIGURES = ("host_wait_us_per_step", "host_wait_us_p50")


@dataclass(frozen=True, kw_only=True)
class Integrity:
    """Report on one trace file.

    num_events: events in the file, of any kind; num_repaired and num_dropped count those mended and left out, ``counts`` by what
    was done, ``places`` the first of each with byte offset in the uncompressed text (−1 unknown) and event name. Overruns are
    device events that outlast the whole next event of their stream; busy times are sums over device events, µs, as recorded and
    with overruns cut. ``clock_jumps``: places where times cannot all be true, as in ``dspark_lab.trace.clock``. ``withheld`` names figures
    that are not given, with the reason.
    """

    num_events: int
    num_repaired: int
    num_dropped: int
    truncated: bool
    counts: dict[str, int]
    places: tuple[dict[str, Any], ...]
    rank: int
    rank_source: str
    steps_source: str
    num_steps: int
    steps_without_device_events: tuple[int, ...]
    num_launches_without_device_events: int
    num_incomplete_replays: int
    num_device_events_without_launch: int
    num_device_events_outside_steps: int
    num_overruns: int
    busy_us: float
    busy_us_without_overruns: float
    clock_jumps: tuple[dict[str, Any], ...]
    withheld: dict[str, str]
    messages: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What undermines the trace, a sentence each: mended, left out, cut short, overrun, withheld. Empty where it is sound."""
        said = [f"{count} × {what}" for what, count in self.counts.items()]
        if self.truncated:
            said.append("the file is cut short")
        if self.num_overruns:
            said.append(f"{self.num_overruns} device events outlast the whole next event of their stream")
        if self.clock_jumps:
            said.append(_jumps(self.clock_jumps))
        return (*said, *(f"{figure} is withheld: {why}" for figure, why in self.withheld.items()))

    @property
    def is_clean(self) -> bool:
        """Nothing mended, left out or withheld."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and texts; ``problems`` among them."""
        plain = asdict(self) | {"problems": self.problems}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


def examine(
    log: ReadLog,
    steps: StepWindows,
    linked: Linked,
    launch_rows: pd.DataFrame,
    *,
    rank: int,
    rank_source: str,
    cpu_only: bool,
) -> Integrity:
    """The report on a trace that was read and linked."""
    left_out = {k: v for k, v in log.counts.items() if k.endswith("left out")}
    repaired = {k: v for k, v in log.counts.items() if not k.endswith("left out")}
    device = linked.device
    swallows, _ = overruns(device)
    busy, cut = (
        float(device["dur_ns"].sum()) / 1000,
        float((sound_ends(device) - device["ts_ns"].to_numpy()).sum()) / 1000,
    )
    empty = _empty_steps(steps, linked, launch_rows) if not cpu_only else ()
    lost = launch_rows[((launch_rows["num_device_events"] == 0) & (launch_rows["step"] >= 0)).to_numpy()]
    incomplete = _incomplete_replays(device, launch_rows)
    facts: dict[str, Any] = {
        "num_events": log.num_events,
        "num_repaired": sum(repaired.values()),
        "num_dropped": sum(left_out.values()),
        "truncated": log.truncated,
        "counts": dict(log.counts),
        "places": tuple(log.places),
        "rank": rank,
        "rank_source": rank_source,
        "steps_source": steps.source,
        "num_steps": len(steps),
        "steps_without_device_events": empty,
        "num_launches_without_device_events": len(lost),
        "num_incomplete_replays": incomplete,
        "num_device_events_without_launch": 0 if linked.by_time else int((device["call"] < 0).sum()),
        "num_device_events_outside_steps": int((device["place"] < 0).sum()),
        "num_overruns": int(swallows.sum()),
        "busy_us": busy,
        "busy_us_without_overruns": cut,
        "clock_jumps": tuple(clock_jumps(linked, steps).to_dict("records")),
    }
    withheld = _withheld(facts, log)
    return Integrity(**facts, withheld=withheld, messages=tuple(_messages(facts, log, steps, linked, withheld)))


def _empty_steps(steps: StepWindows, linked: Linked, launch_rows: pd.DataFrame) -> tuple[int, ...]:
    """Numbers of the steps without device events: where the host launched something, or where other steps have device events."""
    found = np.zeros(len(steps), dtype=bool)
    place = linked.device["place"].to_numpy()
    found[place[place >= 0]] = True
    launched = np.isin(steps.labels, launch_rows["step"].to_numpy())
    missing = ~found & (launched | found.any())
    return tuple(int(x) for x in steps.labels[missing])


def _incomplete_replays(device: pd.DataFrame, launch_rows: pd.DataFrame) -> int:
    """Graph launches with fewer device events than another launch of the same graph.

    The same graph: the same graph id; without ids, the same ordinal in its step and a sequence of kernel names that the
    fuller launch contains in this order.
    """
    graphs = launch_rows[(launch_rows["is_graph"] & (launch_rows["num_device_events"] > 0)).to_numpy()].copy()
    if len(graphs) < 2:
        return 0
    graphs["ordinal"] = graphs.groupby("step").cumcount()
    has_id = (graphs["graph_id"] >= 0).all()
    names = _NamesByCorrelation(device)
    incomplete = 0
    for _, group in graphs.groupby("graph_id" if has_id else "ordinal"):
        sizes, ids = group["num_device_events"].to_numpy(), group["correlation"].to_numpy()
        short = ids[sizes < sizes.max()]
        if has_id:
            incomplete += len(short)
        elif len(short):
            model = names.of(int(ids[sizes.argmax()]))
            incomplete += sum(_is_subsequence(names.of(int(c)), model) for c in short)
    return incomplete


class _NamesByCorrelation:
    """Name codes of the device events of one launch, in order of time; sorted once, so that many launches cost no scan each."""

    def __init__(self, device: pd.DataFrame) -> None:
        correlation = device["correlation"].to_numpy()
        order = np.argsort(correlation, kind="stable")
        self._ids, self._codes = correlation[order], device["name"].cat.codes.to_numpy()[order]

    def of(self, correlation: int) -> list[int]:
        lower, upper = np.searchsorted(self._ids, [correlation, correlation + 1])
        return self._codes[lower:upper].tolist()


def _is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(x in rest for x in part)


def _withheld(facts: dict[str, Any], log: ReadLog) -> dict[str, str]:
    """Figures that the trace does not bear, with the reason."""
    out: dict[str, str] = {}
    empty, n = facts["steps_without_device_events"], facts["num_steps"]
    if facts["num_launches_without_device_events"]:
        why = f"{facts['num_launches_without_device_events']} launch calls have no device event"
        out |= dict.fromkeys(("kernels_per_step", "gpu_span_us_per_step"), why)
    if facts["num_incomplete_replays"]:
        why = f"{facts['num_incomplete_replays']} graph replays hold fewer events than others of their graph"
        out |= dict.fromkeys(("kernels_per_step", "gpu_span_us_per_step"), why)
    lost = {k: v for k, v in log.counts.items() if k.startswith("device event with an impossible time")}
    if lost:
        why = f"{sum(lost.values())} device events with an impossible time were left out"
        out |= dict.fromkeys(("kernels_per_step", "gpu_span_us_per_step", "step_us_mean"), why)
    if empty:
        out |= dict.fromkeys((*DEVICE_FIGURES, *HOST_FIGURES), f"{len(empty)} of {n} steps have no device events")
    elif facts["truncated"] and facts["num_launches_without_device_events"]:
        out |= dict.fromkeys(
            HOST_FIGURES,
            f"the file is cut short within the steps: {facts['num_launches_without_device_events']} launch calls have no device event",
        )
    if facts["clock_jumps"]:
        figures = ["launch_lead_us_p50"]
        if any(j["kind"] == "stands still" for j in facts["clock_jumps"]):
            figures += ["step_us_mean", "gpu_span_us_per_step"]
        if any(
            j["kind"] == "host goes back" for j in facts["clock_jumps"]
        ):  # which calls are of which step is then not known
            figures += [*DEVICE_FIGURES, *HOST_FIGURES]
        out |= {f: _jumps(facts["clock_jumps"]) for f in figures if f not in out}
    if not n:
        out |= dict.fromkeys((*DEVICE_FIGURES, *HOST_FIGURES), "the trace holds no steps")
    return out


def _jumps(jumps: tuple[dict[str, Any], ...]) -> str:
    """Clock jumps in words."""
    words = {
        "host goes back": "the host's clock goes back",
        "before its launch": "device events begin before their launch",
        "stands still": "an idle device leaves what was launched",
    }
    first = jumps[0]
    more = f" ({len(jumps)} such places)" if len(jumps) > 1 else ""
    return f"a clock jumps: {words[first['kind']]}, by {first['us']:,.0f} µs in step {first['step']}{more}"


def _messages(
    facts: dict[str, Any], log: ReadLog, steps: StepWindows, linked: Linked, withheld: dict[str, str]
) -> list[str]:
    said = list(dict.fromkeys(log.notes))
    if facts["truncated"]:
        said.append("the file is cut short; complete events before the cut were read")
    for what, count in log.counts.items():
        first = next((p for p in log.places if p["what"] == what), {"name": "", "offset": -1})
        where = f" at byte {first['offset']}" if first["offset"] >= 0 else ""
        said.append(f"{count} × {what} (first: {first['name']!r}{where})")
    said += steps.messages
    if facts["rank_source"] != "distributedInfo":
        said.append(f"the trace does not tell its rank: taken as {facts['rank']} from the {facts['rank_source']}")
    if linked.by_time:
        said.append(
            "no runtime calls were recorded: device events were given to steps by their time, and launch leads are not known"
        )
    for key, text in (
        ("num_launches_without_device_events", "launch calls inside steps have no device event"),
        ("num_incomplete_replays", "graph replays hold fewer events than others of their graph"),
        ("num_device_events_without_launch", "device events have no launch call in the trace"),
        ("num_device_events_outside_steps", "device events belong to no step"),
    ):
        if facts[key]:
            said.append(f"{facts[key]} {text}")
    if facts["steps_without_device_events"]:
        said.append(f"steps without device events: {', '.join(map(str, facts['steps_without_device_events'][:12]))}")
    if facts["num_overruns"]:
        said.append(
            f"{facts['num_overruns']} device events outlast the whole next event of their stream: busy {facts['busy_us']:.1f} µs as recorded, "
            f"{facts['busy_us_without_overruns']:.1f} µs with them cut there; spans use the latter"
        )
    if facts["clock_jumps"]:
        said.append(_jumps(facts["clock_jumps"]))
    said += [f"{figure} is withheld: {why}" for figure, why in withheld.items()]
    return said
