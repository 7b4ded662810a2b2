"""A trace's summary, steps and integrity for people at a terminal."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dspark_lab.cli.printing import print_table, say
from dspark_lab.trace import Trace, TraceSet

_FIGURES = {
    "num_steps": "steps", "step_us_p50": "step p50", "step_us_mean": "step mean", "gpu_span_us_per_step": "device span a step", "kernels_per_step": "kernels a step",
    "launch_lead_us_p50": "launch lead p50",
}  # fmt: skip
_STEPS = {
    "rank": "rank", "step": "step", "period_us": "period", "compute_us": "compute", "communication_us": "comm", "peer_wait_us": "peer wait", "copy_us": "copy",
    "idle_host_us": "idle: host", "idle_graph_us": "graph", "idle_other_us": "other", "num_kernels": "kernels", "launch_lead_us": "lead",
    "sync_us": "sync", "event_wait_us": "event wait", "blocking_copy_us": "blocking copy",
}  # fmt: skip


def print_summary(found: dict[str, Any]) -> None:
    """Figures with a column a rank, waits by site, and the integrity report."""
    ranks = found.get("ranks", {"": found})
    table = pd.DataFrame({"profiled, µs": [*_FIGURES.values(), *(f"{k} p50" for k in _kinds(ranks))]})
    for rank, one in ranks.items():
        values = [one[k] for k in _FIGURES] + [one["host_wait_us_p50"][k] for k in _kinds(ranks)]
        table[f"rank {rank}" if rank else "value"] = [_number(v) for v in values]
    print_table(table)
    for rank, one in ranks.items():
        waits = pd.DataFrame(one["waits"])
        if len(waits):
            say("")
            print_table(waits.assign(total_us=[_number(v) for v in waits["total_us"]]))
        for text in one["integrity"]["messages"]:
            say(f"{f'rank {rank}: ' if rank else ''}{text}")
    for text in found.get("messages", ()):
        say(text)


def _kinds(ranks: dict[str, Any]) -> list[str]:
    return list(next(iter(ranks.values()))["host_wait_us_p50"])


def print_steps(table: pd.DataFrame) -> None:
    """The steps in few columns, and why parts are withheld."""
    shown = table[list(_STEPS)].rename(columns=_STEPS)
    for column in shown.select_dtypes("float").columns:
        shown[column] = [_number(x) for x in shown[column]]
    print_table(shown)
    why = sorted(set(table["withheld"]) - {""})
    say(
        "profiled; µs; "
        + (f"parts withheld: {'; '.join(why)}" if why else "the parts, compute to other, sum to the period")
    )


def print_integrity(report: dict[str, Any]) -> None:
    """What was found in each rank, the problems first."""
    for rank, one in report["ranks"].items():
        num = len(one["problems"])
        how = "sound" if not num else f"{num} problem{'s' if num > 1 else ''}"
        say(f"rank {rank}: {how}; {one['num_events']} events, {one['num_steps']} steps ({one['steps_source']})")
        for text in one["messages"]:
            say(f"  {text}")
    for text in report["messages"]:
        say(text)


def _number(x: Any) -> str:
    return "–" if x is None or x != x else f"{x:.1f}" if isinstance(x, float) else str(x)


def nothing(opened: Trace | TraceSet, what: str) -> str:
    """Why a table has no rows."""
    traces = [opened] if isinstance(opened, Trace) else list(opened.values())
    if not any(len(t.events) for t in traces):
        return "the trace holds no events with a duration: nothing to show"
    steps = sum(len(t.step_windows) for t in traces)
    return f"the trace holds no {what}; it has {sum(len(t.events) for t in traces):,} events in {steps} step{'s' * (steps != 1)}"
