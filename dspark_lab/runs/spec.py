"""`JobSpec`: what one launch of the worker measures; the files of a job folder and their names. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_lab.config import LabConfig


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One config of a job under a name of its own."""

    name: str
    config: LabConfig
    role: str = "arm"
    """``arm``, or ``aa``: the baseline once more."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Arms that share weights and a world size, measured in one process group, interleaved in blocks."""

    arms: tuple[Arm, ...]
    num_steps: int = 128
    """Measured steps a block."""
    warmup_steps: int = 4
    repeats: int = 5
    """Blocks an arm."""
    profile_steps: int = 8
    """Steps of the profiled capture after the measured blocks; 0 makes none."""
    wait_limit_s: float = 60.0
    """How long a rank waits for the others before it says which one did not come, and all end."""
    process: int = 0
    """Which of the processes an arm is measured in; turns the order of the arms."""

    @property
    def world_size(self) -> int:
        return self.arms[0].config.parallel.world_size

    @property
    def total_steps(self) -> int:
        """Steps over all arms and blocks, for the progress bar."""
        capture = 8 + (self.profile_steps + 2 if self.profile_steps else 0)
        return len(self.arms) * ((self.num_steps + self.warmup_steps) * self.repeats + capture)

    def order(self, repeat: int) -> list[int]:
        """Indices of the arms in block ``repeat``: turned by process, every second block backwards."""
        n = len(self.arms)
        turned = [(i + self.process) % n for i in range(n)]
        return turned[::-1] if repeat % 2 else turned

    def save(self, folder: Path) -> None:
        d = asdict(self) | {"arms": [{"name": a.name, "role": a.role, "config": a.config.to_dict()} for a in self.arms]}
        write_json(folder / "job.json", d)

    @classmethod
    def load(cls, folder: Path) -> JobSpec:
        d = json.loads((folder / "job.json").read_text())
        arms = tuple(
            Arm(name=a["name"], role=a["role"], config=LabConfig.from_dict(a["config"])) for a in d.pop("arms")
        )
        return cls(arms=arms, **d)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a job stands."""

    state: str = "starting"
    """``starting``, ``running``, ``complete``, ``stopped`` or ``failed``."""
    fraction: float = 0.0
    arm: str = ""
    process: int = 0
    repeat: int = 0
    step: int = 0
    num_steps: int = 0
    message: str = ""

    @property
    def done(self) -> bool:
        return self.state in ("complete", "stopped", "failed")


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: under a temporary name, then renamed."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    tmp.write_text(json.dumps(value))
    tmp.rename(path)
