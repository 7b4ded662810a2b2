"""A run's figures as TensorBoard events, written with TensorBoard's own writer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dspark_lab.runs.record import Run

INSTALL = "pip install 'dspark-lab[lab]', or pip install tensorboard torch-tb-profiler"


class Series(NamedTuple):
    """One scalar chart."""

    tag: str
    points: list[tuple[int, float]]
    about: str


def has_tensorboard() -> bool:
    return find_spec("tensorboard") is not None


def series(run: Run) -> list[Series]:
    """The charts of ``run``; those without a finite point are left out."""
    label = run.label
    profiled = f"{run.shown_source} on {run.device_name}, profiled"
    acc = run.acceptance
    by_position = acc.by_position if acc and acc.num_rounds else []
    accept = "simulated acceptance" if run.acceptance_is_simulated else "bonus token included"
    charts = [
        Series(
            "step_latency_ms",
            _steps_ms(run, profiled=False),
            f"unprofiled steps from the third of each block on, blocks one after the other, maximum over ranks; {label}",
        ),
        Series(
            "step_latency_ms_profiled",
            _steps_ms(run, profiled=True),
            f"steps inside the profiler, which slows host calls: not to be compared; {profiled}",
        ),
        Series("step_latency_ms_p50", [(0, run.step_ms_p50)], f"median unprofiled step; {label}"),
        Series("tokens_per_s", [(0, run.tokens_per_s)], f"committed tokens over unprofiled step time; {label}"),
        Series(
            "accept_length", [(0, acc.accept_length if acc else math.nan)], f"mean tokens a round, {accept}; {label}"
        ),
        Series(
            "accept_rate",
            list(enumerate(by_position, start=1)),
            f"share of rounds that accept draft position k; {label}",
        ),
    ]
    finite = [s._replace(points=[p for p in s.points if math.isfinite(p[1])]) for s in charts]
    return [s for s in finite if s.points]


def _steps_ms(run: Run, *, profiled: bool) -> list[tuple[int, float]]:
    rows = run.step_us(profiled=profiled).sort_values(["process", "repeat", "step"])
    return [(i, us / 1e3) for i, us in enumerate(rows["step_us"].tolist())]


def summary(run: Run) -> str:
    """Markdown: where the figures come from, and the config."""
    rows = [
        ("name", run.name),
        ("figures", run.label),
        ("source", run.shown_source),
        ("device", run.device_name),
        ("recorded at", run.environment.get("recorded_at", "")),
        ("captures", f"{len(run.trace_paths)}, profiled" if run.trace_paths else "none"),
        *((f"quoted {k}", v) for k, v in run.quoted.items()),
        *((k, v) for k, v in run.config.to_dict().items()),
    ]
    return _table(rows)


def _table(rows: Iterable[tuple[str, object]]) -> str:
    lines = [f"| {k} | {str(v).replace('|', '/')} |" for k, v in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def write_scalars(run: Run, folder: Path) -> None:
    """One event file in ``folder``: `series` as scalars, `summary` as the text ``run``."""
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    now = time.time()
    writer = EventFileWriter(str(folder))
    try:
        writer.add_event(Event(wall_time=now, step=0, summary=text_pb("run", summary(run))))
        for chart in series(run):
            for step, value in chart.points:
                writer.add_event(Event(wall_time=now, step=step, summary=scalar_pb(chart.tag, value, chart.about)))
    finally:
        writer.close()
