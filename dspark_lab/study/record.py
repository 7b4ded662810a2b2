"""The recordings that ship: what is measured on one and on two GPUs, and the call that makes them again.

Needs only what the base install and torch bring; the result is one archive.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dspark_lab import device as hardware
from dspark_lab.config import LabConfig
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

    A sheet is measured by numbers of ranks, and the archive is written anew after each: a recording that is stopped, or that
    breaks, leaves what was complete.

    ``rehearse``: on this machine's CPU with the preset ``tiny``, a few steps each; nothing of that is worth keeping.
    """
    todo = {name: rehearsed(sheet) if rehearse else sheet for name, sheet in sheets(part).items()}
    for name in only:
        if name not in todo:
            raise unknown("sheet", name, todo)
    todo = {name: sheet for name, sheet in todo.items() if not only or name in only}
    _check_gpus(todo)
    folder, archive = Path(out) / "recorded", Path(out) / f"recorded-{part}.tar"
    for name, sheet in todo.items():
        for configs in _by_ranks(sheet.configs):
            for run in _measured(replace(sheet, configs=configs), Path(out) / f".{name}", on_progress):
                _keep(run, sheet, folder / recorded_name(name, run))
            _pack(folder, archive)
    if not folder.is_dir():
        raise LabError(f"part {part!r} recorded nothing.")
    return archive


def _check_gpus(todo: Mapping[str, Sheet]) -> None:
    """Raises `LabError` before anything is measured where a sheet wants more GPUs than there are."""
    have = hardware.num_gpus()
    for name, sheet in todo.items():
        want = max((c.parallel.world_size for c in sheet.configs if c.engine.device == "cuda"), default=0)
        if want > have:
            raise LabError(
                f"sheet {name!r} wants {want} GPUs, one a rank, and there {'is' if have == 1 else 'are'} {have}; choose sheets of "
                "fewer ranks with only= (--only), or rehearse=True (--rehearse), which runs on this CPU."
            )


def _by_ranks(configs: Sequence[LabConfig]) -> list[tuple[LabConfig, ...]]:
    """Configs by how many ranks they have. What is measured of one number is kept, whatever happens to the next."""
    sizes = sorted({cfg.parallel.world_size for cfg in configs})
    return [tuple(cfg for cfg in configs if cfg.parallel.world_size == n) for n in sizes]


def _measured(sheet: Sheet, work: Path, on_progress: Callable[[Progress], None] | None) -> Iterator[Run]:
    """The runs of ``sheet``, with their files in ``work`` until the next is asked for behind the last."""
    shutil.rmtree(work, ignore_errors=True)
    job = start(
        list(sheet.configs),
        num_steps=sheet.num_steps,
        repeats=sheet.repeats,
        processes=sheet.processes,
        profile_steps=sheet.profile_steps,
        out=work,
    )
    yield from job.wait(on_progress=on_progress)
    shutil.rmtree(work)


def _pack(folder: Path, archive: Path) -> None:
    """All of ``folder`` into ``archive``, whole or not at all."""
    half = archive.with_suffix(".part")
    with tarfile.open(half, "w") as tar:
        tar.add(folder, arcname="recorded")
    half.replace(archive)


def recorded_name(sheet: str, run: Run) -> str:
    """``tp2-ep1-tp2-bs1-none``: the sheet, then the arm without its preset."""
    return f"{sheet}-{run.name.removeprefix(run.config.preset + '-')}"


def _keep(run: Run, sheet: Sheet, folder: Path) -> None:
    """Saves the run; its captures only where the sheet ships them."""
    flat = run.config.to_dict()
    ships = run.config.engine.alloc in sheet.keep_traces and all(flat[k] == v for k, v in sheet.traces_at.items())
    kept = run.trace_paths if ships and run.role == "arm" and not run.same_path_as else ()
    replace(run, name=folder.name, trace_paths=kept).save(folder)
