"""Runs as a TensorBoard log: one folder a run, with traces for the PyTorch profiler plugin and scalars beside them. No torch."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from dspark_lab.errors import LabError
from dspark_lab.export.names import run_names, worker_files
from dspark_lab.export.scalars import INSTALL, has_tensorboard, write_scalars
from dspark_lab.export.server import Server, list_runs, serve
from dspark_lab.runs.record import Run

__all__ = ["Server", "list_runs", "serve", "to_tensorboard"]

MARKER = "dspark_lab.json"
"""What a run's folder keeps of the run itself, so that exporting it again replaces it and nothing else."""


def to_tensorboard(runs: Run | Iterable[Run], *, logdir: Path | str = "tb") -> Path:
    """Writes ``runs`` below ``logdir`` and returns it; show it with `serve`, or ``tensorboard --logdir``.

    A run's folder is named by its config (``tiny-ep2-blocking-bs4``). It holds the captures, copied byte for byte under
    names that the PyTorch profiler plugin accepts; the scalars ``step_latency_ms`` (unprofiled steps, repeats one after
    the other), ``step_latency_ms_profiled``, ``step_latency_ms_p50``, ``accept_length``, ``accept_rate`` (over draft
    positions) and ``tokens_per_s``; and a text with source, device and config. The same run again replaces its folder.

    Where ``tensorboard`` is not installed the captures are written all the same, with a warning that names what is missing.

    Raises `LabError`, with nothing written, for no runs, a capture that is gone, a ``logdir`` that cannot be written, and
    where neither ``tensorboard`` nor any capture is at hand.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    logdir = Path(logdir)
    _check(runs)
    with_scalars = has_tensorboard()
    if not with_scalars:
        if not any(run.trace_paths for run in runs):
            raise LabError(
                f"none of the runs has a capture, and scalars need tensorboard, which is missing: {INSTALL}."
            )
        warnings.warn(f"wrote captures but no scalars: tensorboard is missing; {INSTALL}.", stacklevel=2)
    try:
        _write(runs, logdir, with_scalars=with_scalars)
    except OSError as e:
        raise LabError(
            f"cannot write to logdir={str(logdir)!r}: {e.strerror}; choose a folder that can be written."
        ) from None
    return logdir


def _check(runs: list[Run]) -> None:
    if not runs:
        raise LabError(
            "there are no runs to write; give at least one, from lab.run, lab.sweep, lab.load_run or lab.load_runs."
        )
    for run in runs:
        if not isinstance(run, Run):
            raise LabError(f"{run!r} is no Run; lab.load_run(folder) reads one from disk.")
        for path in run.trace_paths:
            if not path.is_file():
                raise LabError(f"run {run.name!r} lists the capture {path}, and there is no such file.")


def _write(runs: list[Run], logdir: Path, *, with_scalars: bool) -> None:
    """Builds every folder outside ``logdir`` (TensorBoard reads a folder once, when it first sees it), then moves them in."""
    logdir.mkdir(parents=True, exist_ok=True)
    # beside the logdir, hence on its file system: the moves are renames
    with tempfile.TemporaryDirectory(prefix=".dspark_lab_tb_", dir=_beside(logdir)) as tmp:
        built = []
        for run, name in zip(runs, run_names(runs), strict=True):
            folder = Path(tmp) / name
            folder.mkdir()
            for source, target in worker_files(run.trace_paths):
                shutil.copyfile(source, folder / target)
            if with_scalars:
                write_scalars(run, folder)
            marker = _marker(run)
            (folder / MARKER).write_text(marker)
            built.append((folder, marker))
        for folder, marker in built:
            target = _free(logdir / folder.name, marker)
            if target.exists():
                shutil.rmtree(target)
            shutil.move(folder, target)


def _beside(logdir: Path) -> Path:
    """Where to build: next to ``logdir``, or the system's folder for temporary files where that cannot be written."""
    parent = logdir.resolve().parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError:
        return Path(tempfile.gettempdir())


def _marker(run: Run) -> str:
    steps = run.steps["step_us"]
    return json.dumps({**run.to_json(), "steps": [len(steps), float(steps.sum())]}, indent=1) + "\n"


def _free(folder: Path, marker: str) -> Path:
    """``folder``, or with ``-2``, ``-3`` … after it, up to the first that is free or holds the same run."""
    for n in range(1, 10_000):
        candidate = folder if n == 1 else folder.with_name(f"{folder.name}-{n}")
        if not candidate.exists():
            return candidate
        held = candidate / MARKER
        if held.is_file() and held.read_text() == marker:
            return candidate
    raise LabError(f"{folder} and its numbered neighbours are all taken; choose an empty logdir.")
