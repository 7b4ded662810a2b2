"""Where runs lie: those that ship with the package, and folders of the user's own. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from dspark_lab.config import LabConfig
from dspark_lab.config.shipped import data_dir
from dspark_lab.errors import LabError, nearest, unknown
from dspark_lab.runs.record import Run, read_run

_TAIL = re.compile(r"(.+?)-ep\d+(?:-.+?)?-bs\d+")


def recorded_names() -> list[str]:
    """Names of the runs that ship."""
    return sorted(p.parent.name for p in (data_dir() / "recorded").glob("*/run.json"))


def load_run(name: str | Path) -> Run:
    """A run by the name of one that ships, or by its folder. Raises `LabError` with the nearest name."""
    shipped = data_dir() / "recorded" / str(name)
    for folder in (shipped, Path(name)):
        try:
            if (folder / "run.json").is_file():
                return _read_once(folder) if folder == shipped else read_run(folder)
        except OSError:
            pass  # a name that no file can have
    names = recorded_names()
    raise LabError(
        f"no run {str(name)!r}: neither a folder with run.json nor one of {', '.join(names)}.{nearest(name, names)}"
    )


def _read_once(folder: Path) -> Run:
    """A run that ships, read again where its file is another; its table is the caller's own."""
    state = (folder / "run.json").stat()
    run = _kept(folder, state.st_mtime_ns, state.st_size)
    return replace(run, steps=run.steps.copy())


@cache
def _kept(folder: Path, *state: int) -> Run:
    return read_run(folder)


def load_runs(folder: str | Path) -> list[Run]:
    """All runs below ``folder``, by name. Raises `LabError` where it is no folder."""
    if not Path(folder).is_dir():
        raise LabError(f"{folder} is no folder; give one that holds runs.")
    return [read_run(p.parent) for p in sorted(Path(folder).glob("**/run.json"))]


def sample_traces() -> dict[str, Path]:
    """Captures to try the trace analyser on, by name: look-alikes of SGLang and vLLM, made of this package's H200 recordings.

    Each engine has a ``_before`` and an ``_after``. The captures of the recordings themselves are in ``lab.load_run(name).trace_paths``.
    """
    found = sorted((data_dir() / "lookalikes").glob("*.json.gz"))
    return {p.name.removesuffix(".json.gz"): p for p in found}


RECORDED_COLUMNS = (
    "name", "sheet", "preset", "alloc", "ep_size", "tp_size", "batch_size", "block_size", "host_work_us", "use_graph", "device",
    "step_ms_p50", "num_traces", "source", "label",
)  # fmt: skip


def recorded(**toggles: Any) -> pd.DataFrame:
    """The runs that ship, a row each: name, toggles, device, step_ms_p50, captures, where it was measured.

    ``toggles`` keep the rows that have these values: ``lab.recorded(tp_size=2, alloc="blocking")``; ``sheet`` is one too: runs of
    one sheet were measured beside each other. A/A pairs are left out; `load_runs` finds them beside the others. Raises
    `LabError` for an unknown toggle or sheet.
    """
    rows = [_recorded_row(run) for run in recorded_runs(**toggles) if run.role == "arm"]
    return pd.DataFrame(rows, columns=list(RECORDED_COLUMNS))


def recorded_runs(**toggles: Any) -> list[Run]:
    """The runs behind `recorded`, and their A/A pairs, ready for `compare`."""
    runs = [load_run(name) for name in recorded_names()]
    if "sheet" in toggles and toggles["sheet"] not in (sheets := sorted({sheet_of(r.name, r.config) for r in runs})):
        raise unknown("sheet", toggles["sheet"], sheets)
    return [r for r in runs if all(_toggle(r, k) == v for k, v in toggles.items())]


def _toggle(run: Run, name: str) -> Any:
    return sheet_of(run.name, run.config) if name == "sheet" else run.config.toggle(name)


def sheet_of(name: str, cfg: LabConfig) -> str:
    """``small-hostwork-ep1-bs1-hw600-none.aa`` as ``small-hostwork``; of a name without such a tail, all but the strategy."""
    found = _TAIL.match(name)
    if found:
        return found[1].removesuffix(f"-{cfg.preset}") or found[1]
    return name.removesuffix(".aa").removesuffix(f"-{cfg.engine.alloc.replace(':', '-')}")


def _recorded_row(run: Run) -> dict[str, Any]:
    flat = run.config.to_dict()
    return {c: flat[c] for c in RECORDED_COLUMNS if c in flat} | {
        "name": run.name,
        "sheet": sheet_of(run.name, run.config),
        "device": run.device_name,
        "step_ms_p50": run.step_ms_p50,
        "num_traces": len(run.trace_paths),
        "source": run.shown_source,
        "label": run.label,
    }
