"""Whether a trace file is one that Perfetto shows whole: the conditions under which its importer drops or misplaces something."""

from __future__ import annotations

import bisect
import gzip
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dspark_lab.errors import LabError

_PLACES = 20
_NONE = msgspec.Raw(b"none")


@dataclass(frozen=True, kw_only=True)
class PerfettoCheck:
    """num_slices, num_flows, size_mb of text, problems: the first of each kind, empty where the file is as it should be."""

    num_slices: int
    num_flows: int
    size_mb: float
    problems: tuple[str, ...]


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    pid: int = -1
    tid: int = -1
    ts: msgspec.Raw = _NONE
    dur: msgspec.Raw = _NONE
    id: int | None = None
    bp: str = ""
    args: Any = None


class _File(msgspec.Struct):
    traceEvents: list[_Event]


def check_perfetto(path: Path | str) -> PerfettoCheck:
    """Read a trace file strictly, as Perfetto's JSON importer does, and look for what it complains of.

    Checked: strict JSON; every slice with name, integer pid and tid and times from 0 on; on a track two slices lie one within the other or
    apart, and on a stream never one within the other; every flow begins and ends once, inside a slice, and does not run backwards; content
    and suffix agree on gzip. Times are compared as exact nanoseconds.

    Raises:
        LabError: the file is missing.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise LabError(f"{path} cannot be read: {err.strerror}.") from None
    zipped = raw[:2] == b"\x1f\x8b"
    problems = [] if zipped == (path.suffix == ".gz") else ["content and suffix do not agree on gzip"]
    text = gzip.decompress(raw) if zipped else raw
    try:
        events = msgspec.json.decode(text, type=_File).traceEvents
    except msgspec.MsgspecError as err:
        return PerfettoCheck(
            num_slices=0,
            num_flows=0,
            size_mb=len(text) / 1e6,
            problems=(*problems, f"it is no strict trace JSON: {err}"),
        )
    spans: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    streams: set[tuple[int, int]] = set()
    flows: dict[int, list[tuple[str, int, int, int]]] = defaultdict(list)
    for e in events:
        if e.ph == "M":
            if (
                e.name == "thread_name"
                and str((e.args or {}).get("name", "")).startswith("stream")
                and "annot" not in str(e.args)
            ):
                streams.add((e.pid, e.tid))
            continue
        at = _ns(e.ts)
        if at is None or at < 0 or e.pid < 0 or e.tid < 0:
            problems.append(f"{e.ph} event {e.name!r} has no sound place: ts {_shown(e.ts)}, pid {e.pid}, tid {e.tid}")
        elif e.ph == "X":
            dur = _ns(e.dur)
            if dur is None or dur < 0 or not e.name:
                problems.append(f"slice {e.name!r} at {_shown(e.ts)} µs has dur {_shown(e.dur)}")
            else:
                spans[e.pid, e.tid].append((at, at + dur, e.name))
        elif e.ph in ("s", "f"):
            flows[e.id if e.id is not None else -1].append((e.ph, e.pid, e.tid, at))
        else:
            problems.append(f"ph {e.ph!r} is none that is written here")
    for track, own in spans.items():
        problems += _overlaps(own, track, flat=track in streams)
    problems += _loose_flows(flows, spans)
    return PerfettoCheck(
        num_slices=sum(map(len, spans.values())),
        num_flows=len(flows),
        size_mb=len(text) / 1e6,
        problems=tuple(problems[:_PLACES]),
    )


def _ns(us: msgspec.Raw) -> int | None:
    """Exact nanoseconds of a decimal number of µs; None where it is none or finer."""
    whole, _, part = bytes(us).decode().partition(".")
    if not whole.lstrip("-").isdigit() or (part and not part.isdigit()) or len(part.rstrip("0")) > 3:
        return None
    return int(whole) * 1000 + (1 if whole[0] != "-" else -1) * int(part[:3].ljust(3, "0"))


def _shown(us: msgspec.Raw) -> str:
    return bytes(us).decode()


def _overlaps(own: list[tuple[int, int, str]], track: tuple[int, int], *, flat: bool) -> list[str]:
    own.sort(key=lambda s: (s[0], -s[1]))
    open_: list[tuple[int, int, str]] = []
    for one in own:
        while open_ and open_[-1][1] <= one[0]:
            open_.pop()
        if open_ and (flat or one[1] > open_[-1][1]):
            how = "runs while" if flat else "outlasts"
            return [f"on pid {track[0]} tid {track[1]} {one[2]!r} at {one[0]} ns {how} {open_[-1][2]!r} around it"]
        open_.append(one)
    return []


def _loose_flows(
    flows: dict[int, list[tuple[str, int, int, int]]], spans: dict[tuple[int, int], list[tuple[int, int, str]]]
) -> list[str]:
    starts = {track: [s[0] for s in own] for track, own in spans.items()}
    reach: dict[tuple[int, int], list[int]] = {}
    for track, own in spans.items():
        latest, ends = -1, []
        for s in own:
            latest = max(latest, s[1])
            ends.append(latest)
        reach[track] = ends
    for number, points in flows.items():
        kinds = sorted(p[0] for p in points)
        if kinds != ["f", "s"]:
            return [f"flow {number} has the points {kinds}, not one begin and one end"]
        at = {p[0]: p for p in points}
        if at["s"][3] > at["f"][3]:
            return [f"flow {number} runs backwards"]
        for ph, pid, tid, ts in points:
            k = bisect.bisect_right(starts.get((pid, tid), []), ts) - 1
            if k < 0 or reach[pid, tid][k] <= ts:
                return [
                    f"flow {number} {'begins' if ph == 's' else 'ends'} at {ts} ns, outside every slice of its track"
                ]
    return []
