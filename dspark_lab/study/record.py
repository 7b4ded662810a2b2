"""The recordings that ship: what is measured on one and on two GPUs, and the call that makes them again.

Needs only what the base install and torch bring; the result is one archive.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark_lab.config import LabConfig, preset
from dspark_lab.errors import LabError, unknown
from dspark_lab.runs.record import Run
from dspark_lab.runs.runner import start
from dspark_lab.runs.spec import Progress

ALWAYS = ("none", "blocking", "non_blocking", "pinned:always", "persistent:always")
ON_DEMAND = ("on_demand", "pinned", "persistent")
HOST_WORK_US = (200.0, 400.0, 600.0, 800.0, 1000.0)
"""Beside 0, which is the sheet ``small``."""
GRAPH: dict[str, Any] = {"use_graph": True, "overlap": True, "device": "cuda"}


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Configs of one sweep, and how they are measured."""

    configs: tuple[LabConfig, ...]
    num_steps: int = 128
    repeats: int = 2
    processes: int = 3
    profile_steps: int = 8
    keep_traces: tuple[str, ...] = ()
    """Arms by `alloc` whose captures ship; of the others the step tables do."""
    traces_at: dict[str, Any] = field(default_factory=dict)
    """Toggles that a kept capture must have."""


def sheets(part: str) -> dict[str, Sheet]:
    """The sheets of ``part``: ``one`` (one GPU), ``two`` (two GPUs)."""
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    return PARTS[part]()


def _one() -> dict[str, Sheet]:
    small = preset("small", **GRAPH)
    qwen = preset("qwen3-30b-a3b", device="cuda")
    return {
        "small": Sheet(
            configs=tuple(small.replace(batch_size=b, alloc=a) for b in (1, 4, 8, 32) for a in (*ALWAYS, *ON_DEMAND)),
            repeats=1,
            keep_traces=("none", "blocking", "non_blocking"),
            traces_at={"batch_size": 1},
        ),
        "small-hostwork": Sheet(
            configs=tuple(small.replace(host_work_us=us, alloc=a) for us in HOST_WORK_US for a in ("none", "blocking")),
            repeats=1,
            processes=2,
            keep_traces=("none", "blocking"),
            traces_at={"host_work_us": 600.0},
        ),
        "small-eager": Sheet(
            configs=tuple(small.replace(use_graph=False, overlap=False, alloc=a) for a in ("none", "blocking")),
            num_steps=48,
            repeats=3,
            processes=1,
            profile_steps=4,
            keep_traces=("none",),
        ),
        "small-speculation": Sheet(
            configs=tuple(
                small.replace(batch_size=b, alloc="none", speculate=s) for b in (1, 8, 32) for s in (True, False)
            ),
            repeats=1,
            keep_traces=("none",),
            traces_at={"batch_size": 1, "speculate": False},
        ),
        "qwen3-30b-a3b-speculation": Sheet(
            configs=tuple(qwen.replace(alloc="none", speculate=s) for s in (True, False)), repeats=1, profile_steps=0
        ),
        "qwen3-30b-a3b": Sheet(
            configs=tuple(
                qwen.replace(batch_size=b, alloc=a) for b in (1, 8) for a in ("none", "blocking", "on_demand")
            ),
            repeats=1,
            processes=2,
            keep_traces=("none", "blocking"),
            traces_at={"batch_size": 1},
        ),
    }


def _two() -> dict[str, Sheet]:
    tp2 = preset("small", tp_size=2, **GRAPH)
    ep2 = preset("small", ep_size=2, **GRAPH)
    floor = ep2.replace(alloc="none", mask_padding=False)
    seed_arms = ("none", "blocking", "non_blocking", "on_demand")
    return {
        "tp2": Sheet(
            configs=tuple(tp2.replace(alloc=a) for a in seed_arms),
            profile_steps=128,
            keep_traces=("none", "blocking", "non_blocking"),
        ),
        "seed": Sheet(
            configs=tuple(preset("seed", device="cuda").replace(alloc=a) for a in seed_arms),
            repeats=1,
            profile_steps=32,
            keep_traces=("none", "blocking", "non_blocking"),
        ),
        "ep2": Sheet(
            configs=(floor, *(ep2.replace(alloc=a) for a in ("blocking", "non_blocking", "persistent", "graph_slot"))),
            keep_traces=("none", "blocking", "persistent", "graph_slot"),
        ),
        "ep2-dispatch": Sheet(
            configs=tuple(
                ep2.replace(batch_size=b, alloc="graph_slot", dispatcher=name, attn_dp=dp)
                for b in (8, 32)
                for name, dp in (
                    ("all_reduce", 1),
                    ("symm_mem", 1),
                    ("symm_mem", 2),
                    ("all_gather", 2),
                    ("all_to_all", 2),
                )
            ),
            num_steps=96,
            repeats=3,
            processes=1,
            keep_traces=("graph_slot",),
            traces_at={"batch_size": 8, "attn_dp": 2},
        ),
    }


PARTS: dict[str, Callable[[], dict[str, Sheet]]] = {"one": _one, "two": _two}


def record(
    part: str,
    *,
    out: str | Path,
    only: Sequence[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Measures the sheets of ``part`` (or ``only`` some of them) below ``out``; returns the archive ``out/recorded-….tar``."""
    todo = sheets(part)
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
