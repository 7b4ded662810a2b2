"""One run over several machines: a job folder on each, the same worker under torch.distributed.run, and the results put together.

On every host, with a folder that `prepare` wrote there alike::

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr HOST0 --master-port 29500 -m dspark_lab.runs.worker FOLDER

Each rank leaves its result in its own host's folder; `collect` takes all of them. See docs/expert_parallelism.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError, RunFailed
from dspark_lab.runs.job import run_of
from dspark_lab.runs.plan import arm_name
from dspark_lab.runs.record import Run
from dspark_lab.runs.spec import Arm, JobSpec


def prepare(cfg: LabConfig, folder: str | Path, **settings: Any) -> Path:
    """Writes ``job.json`` for one run of ``cfg`` into the new or empty ``folder``; ``settings`` are those of a `JobSpec`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise LabError(f"{folder} holds other things; choose a new or empty folder, the same on every host.")
    try:
        JobSpec(arms=(Arm(name=arm_name(cfg), config=cfg),), **settings).save(folder)
    except TypeError as e:
        raise LabError(f"not a setting of a job: {e}") from None
    return folder


def collect(folders: Sequence[str | Path]) -> Run:
    """The run whose ranks left their results in ``folders``, one a host. Raises `RunFailed` with what a rank said, or lacks."""
    paths = [Path(f) for f in folders]
    spec = JobSpec.load(paths[0])
    errors = [json.loads(p.read_text()) for f in paths for p in f.glob("error.rank*.json")]
    if errors:
        first = min(errors, key=lambda e: e["at"])
        raise RunFailed(f"rank {first['rank']} ended at {first['where']}: {first['message']}")
    found = {int(p.stem.rpartition("rank")[2]): (f, p) for f in paths for p in f.glob("result.rank*.json")}
    if missing := [r for r in range(spec.world_size) if r not in found]:
        raise RunFailed(f"rank {missing[0]} of {spec.world_size} left no result in {', '.join(map(str, paths))}.")
    ranks = [(found[r][0], json.loads(found[r][1].read_text())) for r in range(spec.world_size)]
    run = run_of(spec.arms[0], [ranks], "complete")
    if run is None:
        raise RunFailed("the ranks measured nothing.")
    return run
