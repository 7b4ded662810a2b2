"""The verbs that measure: `run` one config, `sweep` over toggles, `start_sweep` without waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import is_int
from dspark_lab.errors import LabError, nearest
from dspark_lab.runs.job import Job
from dspark_lab.runs.plan import expand, group
from dspark_lab.runs.record import Run
from dspark_lab.runs.spec import Progress


def run(
    cfg: LabConfig,
    *,
    num_steps: int = 128,
    repeats: int = 1,
    profile_steps: int = 8,
    warmup_steps: int = 4,
    out: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Measures ``cfg``: ``num_steps`` decode steps in ``repeats`` blocks, then a profiled capture of ``profile_steps``.

    The ranks are processes of their own; the run is saved as a folder below ``out`` (by default ``runs/<time>-<preset>``).
    """
    job = start(
        [cfg], num_steps=num_steps, repeats=repeats, profile_steps=profile_steps, warmup_steps=warmup_steps, out=out
    )
    runs = job.wait(on_progress=on_progress)
    if not runs:
        raise LabError("the job was stopped before anything was measured.")
    return runs[0]


def sweep(
    cfg: LabConfig,
    *,
    num_steps: int = 128,
    repeats: int = 5,
    processes: int = 1,
    profile_steps: int = 8,
    profile_processes: int = 1,
    warmup_steps: int = 4,
    floor: bool = False,
    out: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **axes: Sequence[Any],
) -> list[Run]:
    """Measures the product of ``axes`` (toggle name = list of values) over ``cfg``.

    Arms that share weights run in one process group, interleaved in blocks, the baseline twice (A/A); different world sizes
    alternate job by job, ``processes`` times. ``floor`` adds the arm with the mask off and ``alloc="none"``. Arms with the
    same code path run once. ``profile_processes`` captures in the first so many processes only. Returns a run an arm; `compare` makes the table.
    """
    job = start_sweep(
        cfg, num_steps=num_steps, repeats=repeats, processes=processes, profile_steps=profile_steps, profile_processes=profile_processes, warmup_steps=warmup_steps,
        floor=floor, out=out, **axes,
    )  # fmt: skip
    return job.wait(on_progress=on_progress)


def start_sweep(cfg: LabConfig, *, floor: bool = False, **options: Any) -> Job:
    """As `sweep`, and returns a `Job` at once: ``poll()``, ``stop()``, ``wait()``."""
    settings = {k: options.pop(k) for k in _SETTINGS if k in options}
    for name in options:
        if name not in cfg.to_dict() and (close := nearest(name, _SETTINGS)):
            raise LabError(
                f"{name!r} is neither a toggle nor a setting of a sweep ({', '.join(_SETTINGS)}, floor).{close}"
            )
    if floor and _asks_for_none(cfg, options):
        raise LabError(
            "alloc='none' at ep_size above 1 is legal with the mask off only, and that is the arm which floor=True (--floor) adds; "
            "leave 'none' out of alloc."
        )
    configs = expand(cfg, options)
    if floor:
        floors = {c.replace(alloc="none", mask_padding=False) for c in configs}
        configs = [*sorted(floors, key=lambda c: c.parallel.ep_size), *configs]
    return start(list(dict.fromkeys(configs)), **settings)


def _asks_for_none(cfg: LabConfig, axes: dict[str, Any]) -> bool:
    """Whether ``none`` is swept over where the scalar is needed."""
    sizes = axes.get("ep_size", [cfg.parallel.ep_size])
    return cfg.engine.mask_padding and "none" in axes.get("alloc", ()) and any(is_int(s) and s > 1 for s in sizes)


_SETTINGS = (
    "num_steps", "repeats", "processes", "profile_steps", "profile_processes", "warmup_steps", "wait_limit_s", "out",
)  # fmt: skip


def start(
    configs: Sequence[LabConfig],
    *,
    num_steps: int = 128,
    repeats: int = 1,
    processes: int = 1,
    profile_steps: int = 8,
    profile_processes: int = 1,
    warmup_steps: int = 4,
    wait_limit_s: float = 60.0,
    out: str | Path | None = None,
) -> Job:
    """Starts measuring ``configs``. A rank that does not come within ``wait_limit_s`` ends the job, with its number. Raises `LabError` for bad numbers or an ``out`` that cannot be written, before anything runs."""
    for name, value, least in (
        ("num_steps", num_steps, 1), ("repeats", repeats, 1), ("processes", processes, 1),
        ("profile_steps", profile_steps, 0), ("warmup_steps", warmup_steps, 0),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise LabError(f"{name}={value!r} is not a whole number of at least {least}.")
    if isinstance(wait_limit_s, bool) or not isinstance(wait_limit_s, int | float) or not wait_limit_s > 0:
        raise LabError(f"wait_limit_s={wait_limit_s!r} is not a time above 0 seconds.")
    if not configs or not all(isinstance(c, LabConfig) for c in configs):
        raise LabError(f"configs={configs!r} are not LabConfigs; lab.preset('tiny') makes one.")
    _check_torch()
    groups = group(configs)
    folder = _out_folder(out, configs[0].preset)
    return Job(
        groups, out=folder, processes=processes, profile_processes=profile_processes, num_steps=num_steps, repeats=repeats,
        profile_steps=profile_steps, warmup_steps=warmup_steps, wait_limit_s=wait_limit_s,
    )  # fmt: skip


def _check_torch() -> None:
    try:
        there = find_spec("torch") is not None
    except ValueError:
        there = False
    if not there:
        raise LabError(
            "measuring needs torch, which is not installed: pip install 'dspark-lab[lab]'. Recorded runs need none."
        )


def _out_folder(out: str | Path | None, preset: str) -> Path:
    """``out``, or a new folder below ``runs/``; made here, so that an unwritable place is refused before the first step."""
    folder = Path(out) if out else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{preset}"
    if out is None:
        base = folder
        for k in itertools.count(2):
            if not folder.exists():
                break
            folder = base.with_name(f"{base.name}-{k}")
    if folder.is_dir() and any(p.name != ".jobs" for p in folder.iterdir()):
        raise LabError(
            f"out={str(folder)!r} holds other things; choose a new or empty folder, so that nothing is overwritten."
        )
    try:
        (folder / ".jobs").mkdir(parents=True, exist_ok=bool(out))
    except FileExistsError:
        raise LabError(f"out={str(folder)!r} is in use by another job; choose another folder.") from None
    except OSError as e:
        raise LabError(
            f"out={str(folder)!r} cannot be written: {e.strerror}; choose a folder that can be written."
        ) from None
    if any((folder / ".jobs").iterdir()):
        raise LabError(
            f"out={str(folder)!r} holds a job that runs or failed (.jobs); choose another folder, or remove it."
        )
    return folder
