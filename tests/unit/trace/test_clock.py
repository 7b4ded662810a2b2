"""Clocks that jump are told, and what they undermine is withheld."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.analysis.breakdown import breakdown
from dspark_lab.trace import open_trace, summarize


def loop(made: Any, *, host: Callable[[int], float], device: Callable[[int], float]) -> Any:
    """Eight steps of 1000 µs, with what is added to the host's and the device's clock in each."""
    trace = made()
    for step in range(8):
        t, h, d = 1000.0 * step, host(step), device(step)
        trace.mark(f"ProfilerStep#{step}", t + h, 950)
        for k in range(3):
            trace.device(f"k{k}", t + d + 100 + 250 * k, 200, trace.call("LaunchKernel", t + h + 10 + 20 * k, 10))
    return trace


@pytest.mark.parametrize(
    ("host", "device", "kind", "step", "us"),
    [
        (lambda s: -3000.0 * (s >= 4), lambda s: 0.0, "host goes back", 4, 2040.0),
        (lambda s: 3000.0 * (s >= 4), lambda s: 0.0, "before its launch", 4, 2910.0),
        (lambda s: 0.0, lambda s: -3000.0 * (s >= 4), "before its launch", 4, 2910.0),
        (lambda s: 0.0, lambda s: 2e6 * (s >= 4), "stands still", 4, 2_000_080.0),
    ],
)
def test_jumps_are_told(made: Any, write: Any, host: Any, device: Any, kind: str, step: int, us: float) -> None:
    trace = open_trace(write(loop(made, host=host, device=device).content()))
    first = trace.integrity.clock_jumps[0]
    assert (first["kind"], first["us"]) == (kind, us)
    if kind != "host goes back":  # there the ranges of two steps overlap
        assert first["step"] == step
    found = summarize(trace)
    assert found["launch_lead_us_p50"] is None
    assert "a clock jumps" in found["integrity"]["withheld"]["launch_lead_us_p50"]
    assert any("a clock jumps" in p for p in found["integrity"]["problems"])
    table = breakdown(trace).set_index("step")
    assert "a clock jumps" in table.loc[first["step"], "withheld"]
    assert (table.loc[1, "withheld"] == "") == (kind != "host goes back")
    assert (found["step_us_p50"] is None) == (kind == "host goes back")


def test_a_steady_clock_is_let_be(made: Any, write: Any, h200: Path) -> None:
    assert open_trace(write(loop(made, host=lambda s: 0, device=lambda s: 0).content())).integrity.clock_jumps == ()
    for path in sorted(h200.glob("*.gz")):
        assert open_trace(path).integrity.clock_jumps == (), path.name
