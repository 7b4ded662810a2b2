"""The recordings that ship: what is measured on one and on two GPUs, and the call that makes them again.

Needs only what the base install and torch bring; the result is one archive.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dspark_lab.errors import LabError, unknown
from dspark_lab.runs.record import Run
from dspark_lab.runs.runner import start
from dspark_lab.runs.spec import Progress
from dspark_lab.study.sheets import Sheet, rehearsed, sheets


def record(
    part: str,
    *,
    out: str | Path,
    only: Sequence[str] = (),
    rehearse: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Measures the sheets of ``part`` (or ``only`` some of them) below ``out``; returns the archive ``out/recorded-….tar``.

    ``rehearse``: on this machine's CPU with the preset ``tiny``, a few steps each; nothing of that is worth keeping.
    """
    todo = {name: rehearsed(sheet) if rehearse else sheet for name, sheet in sheets(part).items()}
    for name in only:
        if name not in todo:
            raise unknown("sheet", name, todo)
    folder = Path(out) / "recorded"
    for name, sheet in todo.items():
        if only and name not in only:
            continue
        work = Path(out) / f".{name}"
        shutil.rmtree(work, ignore_errors=True)
        job = start(
            list(sheet.configs),
            num_steps=sheet.num_steps,
            repeats=sheet.repeats,
            processes=sheet.processes,
            profile_steps=sheet.profile_steps,
            out=work,
        )
        for run in job.wait(on_progress=on_progress):
            _keep(run, sheet, folder / recorded_name(name, run))
        shutil.rmtree(work)
    if not folder.is_dir():
        raise LabError(f"part {part!r} recorded nothing.")
    archive = Path(out) / f"recorded-{part}.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, arcname="recorded")
    return archive


def recorded_name(sheet: str, run: Run) -> str:
    """``tp2-ep1-tp2-bs1-none``: the sheet, then the arm without its preset."""
    return f"{sheet}-{run.name.removeprefix(run.config.preset + '-')}"


def _keep(run: Run, sheet: Sheet, folder: Path) -> None:
    """Saves the run; its captures only where the sheet ships them."""
    flat = run.config.to_dict()
    ships = run.config.engine.alloc in sheet.keep_traces and all(flat[k] == v for k, v in sheet.traces_at.items())
    kept = run.trace_paths if ships and run.role == "arm" and not run.same_path_as else ()
    replace(run, name=folder.name, trace_paths=kept).save(folder)
