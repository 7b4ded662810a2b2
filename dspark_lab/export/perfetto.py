"""Traces as JSON that Perfetto takes without complaint: nothing overlaps on a track, flows bind, times are exact, the size has a limit."""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_lab.analysis.comm import clocks
from dspark_lab.errors import LabError
from dspark_lab.export.perfetto_check import check_perfetto
from dspark_lab.export.target import target_file
from dspark_lab.export.tracks import Slices, slices
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.span import StepRange

#: Beyond this many MB of text viewers in a browser become slow; from about 500 MB they show nothing.
MAX_MB = 200.0
_ARGS = ("correlation", "stream", "bytes", "graph_id", "graph_node_id", "external_id")


@dataclass(frozen=True, kw_only=True)
class PerfettoFile:
    """What was written, as read back from the file.

    num_slices, num_flows; num_cut: slices cut to end with the one around them or before the next of their stream; size_mb of text;
    steps: first and last number, None where there are none; messages: what was left out or moved, and why.
    """

    path: Path
    num_slices: int
    num_flows: int
    num_cut: int
    size_mb: float
    steps: tuple[int, int] | None
    messages: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()
        }


def to_perfetto(
    source: Any,
    path: Path | str,
    *,
    steps: slice | int | None = None,
    window_us: tuple[float, float] | None = None,
    max_mb: float = MAX_MB,
) -> PerfettoFile:
    """Write a trace, or all ranks of a job on one time axis, for Perfetto; read it back and check it.

    Ranks get processes of their own, their clocks are brought together by matched collectives, and flows go from each launch to the first
    event it put on each stream. Where parts of a graph or broken events overlap on a stream, they lie on a lane beside it.

    Args:
        source: what `open_trace` takes.
        path: the file, plain or gzip by its suffix ``.gz``.
        steps: step numbers, ``slice(2, 5)`` or one; None for all.
        window_us: (from, to) in µs after the first event of the capture, instead of steps.
        max_mb: limit of the text; whole steps are left out from the end until it is kept, and the result says so.

    Raises:
        LabError: no such step, nothing in the window, not one step within ``max_mb``, or a path that cannot be written.
    """
    wanted = StepRange.of(steps)
    opened = open_trace(source)
    path = target_file(path, opened)
    if not (isinstance(max_mb, (int, float)) and math.isfinite(max_mb) and max_mb > 0):
        raise LabError(f"max_mb={max_mb!r} is no size; give megabytes above 0, such as {MAX_MB:g}.")
    if steps is not None and window_us is not None:
        raise LabError("give steps or window_us, not both.")
    traces = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
    windows = {r: _window(t, wanted if steps is not None else None, window_us) for r, t in traces.items()}
    offsets, messages = _offsets(traces)
    made = slices(traces, windows, offsets)
    if steps is not None:
        made = _only(made, wanted)
    if not len(made.rows):
        where = "in the window" if steps is not None or window_us is not None else "with a duration"
        raise LabError(
            f"{getattr(opened, 'path', None) or 'the trace'} holds no event {where}; there is nothing to write."
        )
    last, left_out = _write(made, traces, path, max_mb)
    if left_out:
        messages.append(
            f"steps after {last} are left out to keep the text within {max_mb:g} MB; choose others with steps="
        )
    found = check_perfetto(path)
    if found.problems:
        raise LabError(f"{path} was written but does not read back as it should: {found.problems[0]}.")
    numbers = sorted(set(made.rows["step"][: found.num_slices]) - {-1})
    return PerfettoFile(
        path=path,
        num_slices=found.num_slices,
        num_flows=found.num_flows,
        num_cut=int((made.rows["cut_ns"].to_numpy()[: found.num_slices] > 0).sum()),
        size_mb=found.size_mb,
        steps=(int(numbers[0]), int(numbers[-1])) if numbers else None,
        messages=tuple(messages),
    )


def _window(trace: Trace, steps: StepRange | None, window_us: tuple[float, float] | None) -> tuple[int, int] | None:
    """[first, last) in the rank's own ns: host and device time of the steps."""
    if window_us is not None:
        low, high = _times(window_us)
        return trace.t0_ns + round(low * 1000), trace.t0_ns + round(high * 1000)
    if steps is None:
        return None
    labels = trace.step_windows.labels
    mine = np.flatnonzero(steps.holds(labels))
    if not len(mine):
        raise steps.none_of(labels, f"rank {trace.rank}")
    place = trace.linked.device["place"].to_numpy()
    ends = trace.sound_ends_ns[np.isin(place, mine)]
    return int(trace.step_windows.start_ns[mine[0]]), int(max(trace.step_windows.end_ns[mine[-1]], ends.max(initial=0)))


def _times(window_us: Any) -> tuple[float, float]:
    try:
        low, high = (float(t) for t in window_us)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high < math.inf:
        raise LabError(f"window_us={window_us!r} is no window; give (from, to) in µs with from < to.")
    return low, high


def _only(made: Slices, steps: StepRange) -> Slices:
    """Without device events that other steps launched and host events that began in them: the window of device time reaches over both."""
    step = made.rows["step"].to_numpy()
    keep = (step < 0) | steps.holds(step)
    place = np.cumsum(keep) - 1
    flows = made.flows[keep[made.flows["from_slice"].to_numpy()] & keep[made.flows["to_slice"].to_numpy()]]
    flows = flows.assign(from_slice=place[flows["from_slice"].to_numpy()], to_slice=place[flows["to_slice"].to_numpy()])
    return Slices(rows=made.rows[keep].reset_index(drop=True), flows=flows, tracks=made.tracks)


def _offsets(traces: Mapping[int, Trace]) -> tuple[dict[int, int], list[str]]:
    if len(traces) < 2:
        return dict.fromkeys(traces, 0), []
    table = clocks(traces)
    if not len(table):
        return dict.fromkeys(traces, 0), ["the ranks have no collectives in common: their clocks are as recorded"]
    offsets = {int(r): round(1000 * us) for r, us in zip(table["rank"], table["offset_us"], strict=True)}
    apart = float(table["uncertainty_us"].max())
    largest = float(table["offset_us"].abs().max())
    return {r: offsets.get(r, 0) for r in traces}, [
        f"clocks of the ranks were brought together by collectives: up to {largest:.1f} µs apart, known to ± {apart:.1f} µs"
    ]


def _write(made: Slices, traces: Mapping[int, Trace], path: Path, max_mb: float) -> tuple[int, bool]:
    """(last step written, whether later ones were left out)."""
    t0 = int(made.rows["ts_ns"].min())
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": t0,
        "traceName": path.name,
        "traceEvents": [],
    }
    start = json.dumps(head).removesuffix("]}").encode() + b"\n"
    limit = int(max_mb * 1e6)
    size, last, left_out = len(start) + 2, -1, False
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as err:
        raise LabError(f"cannot write {path}: {err.strerror}; choose a folder that can be written.") from None
    try:
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.open(raw, "wb", compresslevel=4) if path.suffix == ".gz" else raw as out,
        ):
            out.write(start + ",\n".join(_metadata(made, traces)).encode())
            for step, text in _pieces(made, traces, t0):
                if size + len(text) > limit:
                    left_out = True
                    break
                out.write(b",\n" + text)
                size, last = size + len(text) + 2, step
            out.write(b"\n]}\n")
        if last < 0 and left_out:
            raise LabError(f"not even one step fits max_mb={max_mb:g}; give fewer steps, or a larger limit.")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return last, left_out


def _metadata(made: Slices, traces: Mapping[int, Trace]) -> Iterator[str]:
    used = set(made.rows["track"].tolist())
    for i, track in enumerate(made.tracks):
        if i not in used:
            continue
        for what, value in (
            ("process_name", track.process),
            ("process_labels", "profiled"),
            ("thread_name", track.name),
        ):
            key = "labels" if what == "process_labels" else "name"
            yield json.dumps({"ph": "M", "name": what, "pid": track.pid, "tid": track.tid, "args": {key: value}})
        yield json.dumps(
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": track.pid,
                "tid": track.tid,
                "args": {"sort_index": track.pid},
            }
        )
        yield json.dumps(
            {"ph": "M", "name": "thread_sort_index", "pid": track.pid, "tid": track.tid, "args": {"sort_index": i}}
        )


def _pieces(made: Slices, traces: Mapping[int, Trace], t0: int) -> Iterator[tuple[int, bytes]]:
    """(step, text of its slices and flows), the events outside every step with the first; flows stand with the step they arrive in."""
    rows, flows = made.rows, made.flows.sort_values("to_slice")
    step = rows["step"].to_numpy()
    first_inside = int(np.searchsorted(step, 0))
    bounds = [0, *(first_inside + np.flatnonzero(np.diff(step[first_inside:])) + 1).tolist(), len(rows)]
    arrive = np.searchsorted(flows["to_slice"].to_numpy(), bounds)
    texts = {r: _Texts(t) for r, t in traces.items()}
    for k in range(len(bounds) - 1):
        low, high = bounds[k], bounds[k + 1]
        if low == high:
            continue
        lines = _slice_lines(rows.iloc[low:high], made, texts, t0)
        lines += _flow_lines(made, flows.iloc[arrive[k] : arrive[k + 1]], int(arrive[k]), t0)
        yield int(step[high - 1]), ",\n".join(lines).encode()


class _Texts:
    """Names and categories of a rank as JSON, and the columns its arguments come from."""

    def __init__(self, trace: Trace) -> None:
        self.names = [json.dumps(str(n)) for n in trace.events["name"].cat.categories]
        self.categories = [json.dumps(str(n)) for n in trace.events["category"].cat.categories]
        self.args = {a: trace.events[a].to_numpy() for a in _ARGS}


def _slice_lines(rows: Any, made: Slices, texts: Mapping[int, _Texts], t0: int) -> list[str]:
    lines = []
    columns = (
        rows[c].tolist() for c in ("name", "category", "ts_ns", "dur_ns", "cut_ns", "track", "step", "rank", "event")
    )
    for name, category, ts, dur, cut, track, step, rank, event in zip(*columns, strict=True):
        text, where = texts[rank], made.tracks[track]
        args = "".join(f',"{a}":{v}' for a in _ARGS if (v := int(text.args[a][event])) >= 0)
        if cut > 0:
            args += f',"recorded_dur_us":{_us(dur + cut)}'
        lines.append(
            f'{{"ph":"X","name":{text.names[name]},"cat":{text.categories[category]},"pid":{where.pid},"tid":{where.tid},'
            f'"ts":{_us(ts - t0)},"dur":{_us(dur)},"args":{{"step":{step}{args}}}}}'
        )
    return lines


def _flow_lines(made: Slices, flows: Any, first_id: int, t0: int) -> list[str]:
    lines = []
    ts, track = made.rows["ts_ns"].to_numpy(), made.rows["track"].to_numpy()
    for k, (a, b) in enumerate(zip(flows["from_slice"].tolist(), flows["to_slice"].tolist(), strict=True)):
        for ph, row, more in (("s", a, ""), ("f", b, ',"bp":"e"')):
            where = made.tracks[int(track[row])]
            lines.append(
                f'{{"ph":"{ph}","id":{first_id + k + 1},"cat":"launch","name":"launch","pid":{where.pid},"tid":{where.tid},"ts":{_us(int(ts[row]) - t0)}{more}}}'
            )
    return lines


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
