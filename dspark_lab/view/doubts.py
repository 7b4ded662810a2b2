"""What a picture of a trace must say before its times are believed: what the integrity report withholds, and which steps are not whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_lab.analysis.breakdown import breakdown

RANK_UNTOLD = "the trace does not tell its rank"


def doubts(trace: Any, *, alone: bool = True) -> tuple[str, ...]:
    """What the integrity report says, the figures it withholds as one line; ``alone``: no other rank is beside it."""
    report = trace.integrity
    said = [m for m in report.messages if " is withheld: " not in m and not (alone and m.startswith(RANK_UNTOLD))]
    by_reason: dict[str, list[str]] = {}
    for figure, why in report.withheld.items():
        by_reason.setdefault(why, []).append(figure)
    return (*(f"not given: {', '.join(figures)} ({why})" for why, figures in by_reason.items()), *said)


def doubtful_steps(trace: Any) -> dict[int, str]:
    """Steps whose record on the device is not whole, with the reason: what looks idle there is none."""
    report, missing = trace.integrity, {}
    if trace.is_cpu_only or not len(trace.step_windows):
        return {}
    if report.num_launches_without_device_events or report.num_incomplete_replays or report.truncated:
        withheld = breakdown(trace)
        missing |= dict(zip(withheld["step"].tolist(), withheld["withheld"].tolist(), strict=True))
    missing |= dict.fromkeys(report.steps_without_device_events, "no device events")
    return {int(step): str(why) for step, why in missing.items() if why}


def notes(traces: Mapping[str, Any]) -> list[str]:
    """One ⚠ line for each reason that figures of these traces are withheld, for the line under a title."""
    said: dict[str, list[str]] = {}
    for name, trace in traces.items():
        for why in dict.fromkeys(trace.integrity.withheld.values()):
            said.setdefault(str(why), []).append(name)
    return [f"⚠ {', '.join(names)}: {why}" for why, names in said.items()]
