"""A diff as one HTML page that needs nothing else: the verdict in words, pictures, the table of parts, what the traces do not bear."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.device_line import COMMUNICATION, COMPUTE, COPY, DeviceLine, lines
from dspark_lab.analysis.diff import Diff, diff
from dspark_lab.errors import LabError
from dspark_lab.export.page import page, section, table
from dspark_lab.export.pictures import COLOURS, Strip, causes_svg, steps_svg, strips_svg
from dspark_lab.export.target import target_file
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.summary import SKIPPED_STEPS

_CATEGORY = {
    "kernel": "compute", "communication": "communication", "peer_wait": "communication", "copy": "copy", "wait": "wait", "bubble": "host", "launch": "idle",
    "graph_gap": "graph",
}  # fmt: skip
_KIND = {COMPUTE: "compute", COMMUNICATION: "communication", COPY: "copy"}
_LEGEND = {
    "compute": "kernels", "communication": "communication", "copy": "copies", "wait": "synchronises and blocking copies, and the device dry for them",
    "event wait": "waits for an event of an earlier step", "host": "launch calls, host work",
    "idle": "launch latency", "graph": "between graph nodes",
}  # fmt: skip
_CAUSES, _ROWS = 10, 40


def to_report(
    before: Any,
    after: Any,
    path: Path | str,
    *,
    names: tuple[str, str] | None = None,
    comm_patterns: Mapping[str, str] | None = None,
) -> Path:
    """Write the diff of two traces, or of two lists of captures, as one HTML page, and return its path.

    The page holds its style and pictures and loads nothing. Where causes are withheld it says why and shows none.

    Args:
        before, after: what `diff` takes.
        names: what to call the sides; default their files' names.

    Raises:
        LabError: a side without steps, or a path that cannot be written.
    """
    sides = [[open_trace(s) for s in (x if isinstance(x, (list, tuple)) else [x])] for x in (before, after)]
    path = target_file(path, *sides[0], *sides[1])
    found = diff(*sides, comm_patterns=comm_patterns)
    called = names or _names(sides)
    text = _page(found, sides, called, comm_patterns)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise LabError(f"cannot write {path}: {err.strerror}; choose a file that can be written.") from None
    return path


def _names(sides: list[list[Trace | TraceSet]]) -> tuple[str, str]:
    named = [s[0].name if isinstance(s[0], Trace) else _folder(s[0]) for s in sides]
    if named[0] == named[1]:
        named = [f"{n} ({w})" for n, w in zip(named, ("before", "after"), strict=True)]
    return named[0], named[1]


def _folder(ranks: TraceSet) -> str:
    if ranks.path is None:
        return f"{len(ranks)} ranks"
    return ranks.path.parent.name if ranks.path.name == "traces" else ranks.path.name


def _page(
    found: Diff, sides: list[list[Trace | TraceSet]], names: tuple[str, str], comm_patterns: Mapping[str, str] | None
) -> str:
    low, high = found.interval
    known = low == low
    facts = [
        ("before", f"{found.before_us:,.1f} µs", names[0]),
        ("after", f"{found.after_us:,.1f} µs", names[1]),
        ("delta of the median step", f"{found.delta_us:+,.1f} µs", f"{100 * found.delta_us / found.before_us:+.1f} %"),
        ("95 % interval", f"{low:+,.1f} to {high:+,.1f} µs" if known else "too few steps", "over steps: weak" if found.weak else "over captures"),
    ]  # fmt: skip
    periods = [(n, np.concatenate([_late(t)[0] for t in side])) for n, side in zip(names, sides, strict=True)]
    body = [
        f'<p class="verdict {found.verdict}"><b>{found.verdict}</b> {escape(found.sentence)}</p>',
        f'<p class="note">{escape(found.reason)}. Every time here is profiled: the profiler slows host calls, so these are not the costs of a run without it.</p>'
        if found.reason
        else "",
        '<div class="facts">'
        + "".join(f"<div><span>{escape(a)}</span><b>{escape(b)}</b><i>{escape(c)}</i></div>" for a, b, c in facts)
        + "</div>",
        section("Steps compared", steps_svg(periods), "µs; the third step and later, over ranks the slowest"),
    ]
    if found.withheld:
        body.append(section("Causes", f'<p class="withheld">Withheld: {escape(found.withheld)}.</p>'))
    else:
        strips = [_strip(n, side[0], comm_patterns) for n, side in zip(names, sides, strict=True)]
        body += [
            section(
                "Where the delta comes from",
                causes_svg(_causes(found), found.delta_us),
                "µs a step; what is slower to the right",
            ),
            section(
                "The median step of each",
                strips_svg(strips) + _legend(),
                "µs from its first device event; host above, device below",
            ),
            section("Parts", _parts(found), f"they sum to the delta; residual {found.residual_us:+.2f} µs"),
        ]
    body.append(section("What the traces do not bear", _integrity(sides, names)))
    return page(f"{names[0]} → {names[1]}", "".join(body))


def _late(opened: Trace | TraceSet) -> tuple[np.ndarray, pd.DataFrame]:
    """Periods of the steps compared, µs, the slowest rank's; and by rank."""
    traces = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
    by_rank = pd.concat(
        {r: pd.Series(t.steps()["period_us"].to_numpy(), index=t.step_windows.labels) for r, t in traces.items()},
        axis=1,
    ).dropna()
    late = by_rank.iloc[SKIPPED_STEPS:] if len(by_rank) > SKIPPED_STEPS else by_rank
    return late.max(axis=1).to_numpy(), late


def _strip(name: str, opened: Trace | TraceSet, comm_patterns: Mapping[str, str] | None) -> Strip:
    """The step nearest to the median, of its slowest rank."""
    periods, by_rank = _late(opened)
    at = int(np.abs(periods - np.median(periods)).argmin())
    step, rank = int(by_rank.index[at]), int(by_rank.columns[int(by_rank.iloc[at].to_numpy().argmax())])
    line: DeviceLine = lines(opened, comm_patterns)[rank]
    one = line.slices[int(np.flatnonzero(line.trace.step_windows.labels == step)[0])]
    start = (line.start[one.events] - one.begin_ns) / 1000
    dur = (line.end[one.events] - line.start[one.events]) / 1000
    device = [
        (a, d, _KIND[int(k)]) for a, d, k in zip(start.tolist(), dur.tolist(), line.kind[one.events], strict=True)
    ]
    host: list[tuple[float, float, str]] = []
    waits = line.trace.waits()
    ahead = (waits["kind"] == "event_wait").to_numpy()
    for rows, category in ((line.trace.launches(), "host"), (waits[ahead], "event wait"), (waits[~ahead], "wait")):
        near = rows[((rows["ts_ns"] < one.end_ns) & (rows["ts_ns"] + rows["dur_us"] * 1000 > one.begin_ns)).to_numpy()]
        host += [
            ((t - one.begin_ns) / 1000, d, category)
            for t, d in zip(near["ts_ns"].tolist(), near["dur_us"].tolist(), strict=True)
        ]
    which = f"step {step}" + (f", rank {rank}" if len(by_rank.columns) > 1 else "")
    return Strip(name=name, which=which, period_us=(one.end_ns - one.begin_ns) / 1000, device=device, host=host)


def _causes(found: Diff) -> list[tuple[str, float, str]]:
    """The largest causes in words, the rest as one."""
    parts = found.parts
    big = parts[(parts["delta_us"].abs() >= max(0.5, 0.01 * abs(found.delta_us))).to_numpy()].head(_CAUSES)
    out = [(_words(r), float(r["delta_us"]), _CATEGORY[r["kind"]]) for r in big.to_dict("records")]
    rest = found.delta_us - sum(us for _, us, _ in out)
    return [*out, (f"{len(parts) - len(big)} smaller parts, residual", rest, "idle")]


def _words(part: dict[Any, Any]) -> str:
    site = f" at {part['site']}" if part["site"] else ""
    return f"{str(part['kind']).replace('_', ' ')}: {part['name']}{site}"


def _legend() -> str:
    return (
        '<p class="legend">'
        + "".join(f'<span><i style="background:{COLOURS[k]}"></i>{escape(v)}</span>' for k, v in _LEGEND.items())
        + "</p>"
    )


def _parts(found: Diff) -> str:
    shown = found.parts.head(_ROWS)
    rest = found.parts.iloc[_ROWS:]
    rows = [
        (str(r["kind"]).replace("_", " "), r["name"], r["site"], f"{r['before_us']:,.1f}", f"{r['after_us']:,.1f}", f"{r['delta_us']:+,.1f}",
         f"{r['count_before']:g} → {r['count_after']:g}" if r["kind"] in ("kernel", "communication", "copy") else "", r["matched"])
        for r in shown.to_dict("records")
    ]  # fmt: skip
    if len(rest):
        sums = rest[["before_us", "after_us", "delta_us"]].sum()
        rows.append(
            (
                "",
                f"{len(rest)} smaller parts",
                "",
                f"{sums['before_us']:,.1f}",
                f"{sums['after_us']:,.1f}",
                f"{sums['delta_us']:+,.1f}",
                "",
                "",
            )
        )
    sums = found.parts[["before_us", "after_us", "delta_us"]].sum()
    foot = (
        "",
        "all parts",
        "",
        f"{sums['before_us']:,.1f}",
        f"{sums['after_us']:,.1f}",
        f"{sums['delta_us']:+,.1f}",
        "",
        "",
    )
    return table(
        ("kind", "what", "site", "before µs", "after µs", "delta µs", "a step", "matched"),
        [*rows, foot],
        numbers=(3, 4, 5),
        wrap=(1, 2),
    )


def _integrity(sides: list[list[Trace | TraceSet]], names: tuple[str, str]) -> str:
    out = []
    for name, side in zip(names, sides, strict=True):
        for opened in side:
            traces = dict(opened) if isinstance(opened, TraceSet) else {opened.rank: opened}
            for rank, trace in traces.items():
                report = trace.integrity
                said = "".join(f"<li>{escape(m)}</li>" for m in report.messages)
                mark = "sound" if report.is_clean else "undermined"
                head = f"{trace.name} (rank {rank}), {report.num_steps} steps, {report.num_events} events"
                out.append(
                    f'<li><b>{escape(name)}</b>: {escape(head)}: <span class="{mark}">{mark}</span><ul>{said}</ul></li>'
                )
    return f"<ul>{''.join(out)}</ul>"
