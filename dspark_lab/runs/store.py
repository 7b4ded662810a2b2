"""Where runs lie: those that ship with the package, and folders of the user's own. No torch."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dspark_lab.errors import LabError, nearest
from dspark_lab.runs.record import Run, read_run


def data_dir() -> Path:
    """The folder of shipped data: inside the wheel, or ``data/`` of a checkout."""
    packed = Path(__file__).parents[1] / "_data"
    return packed if packed.is_dir() else Path(__file__).parents[2] / "data"


def recorded_names() -> list[str]:
    """Names of the runs that ship."""
    return sorted(p.parent.name for p in (data_dir() / "recorded").glob("*/run.json"))


def load_run(name: str | Path) -> Run:
    """A run by the name of one that ships, or by its folder. Raises `LabError` with the nearest name."""
    shipped = data_dir() / "recorded" / str(name)
    if (shipped / "run.json").is_file():
        return read_run(shipped)
    if (Path(name) / "run.json").is_file():
        return read_run(name)
    names = recorded_names()
    raise LabError(
        f"no run {str(name)!r}: neither a folder with run.json nor one of {', '.join(names)}.{nearest(name, names)}"
    )


def load_runs(folder: str | Path) -> list[Run]:
    """All runs below ``folder``, by name."""
    return [read_run(p.parent) for p in sorted(Path(folder).glob("**/run.json"))]


def recorded() -> pd.DataFrame:
    """The runs that ship, a row each: name, toggles, device, step_ms_p50, where it was measured, captures."""
    rows = []
    for name in recorded_names():
        run = load_run(name)
        e, p = run.config.engine, run.config.parallel
        rows.append(
            {
                "name": name,
                "alloc": e.alloc,
                "ep_size": p.ep_size,
                "tp_size": p.tp_size,
                "batch_size": e.batch_size,
                "block_size": run.config.model.drafter.block_size,
                "use_graph": e.use_graph,
                "device": run.device_name,
                "step_ms_p50": run.step_ms_p50,
                "num_traces": len(run.trace_paths),
                "source": run.shown_source,
                "label": run.label,
            }
        )
    columns = ["name", "alloc", "ep_size", "tp_size", "batch_size", "block_size", "use_graph", "device", "step_ms_p50",
               "num_traces", "source", "label"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
