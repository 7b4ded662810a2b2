"""The one place that asks what hardware there is: devices, memory, the environment snapshot, and named phases for the profiler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from torch.profiler import record_function

from dspark_lab.errors import LabError

_named_phases = False


def name_phases(on: bool) -> None:
    """Switches `phase` on (inside a profiler capture) or off (measuring: no overhead in the step)."""
    global _named_phases
    _named_phases = on


def phase(name: str) -> AbstractContextManager[Any]:
    """A range such as ``dspark::draft`` in the trace; nothing at all outside a capture."""
    return record_function(name) if _named_phases else nullcontext()


@contextmanager
def one_cycle() -> Iterator[None]:
    """Around a profiler that keeps one cycle: torch before 2.13 warns then that others are not kept.

    ``acc_events=True`` would silence it too, and reads every event in Python: seconds a capture.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
        yield


def resolve(device: str, *, rank: int | None = None) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` to the device of this rank; None is the process's current GPU (`torch.cuda.set_device`).

    Raises `LabError` where no GPU is there for it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    count = num_gpus()
    if count == 0:
        raise LabError(
            "device='cuda' was asked for and this machine has no GPU that torch can use; choose device='cpu' or 'auto'."
        )
    if rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    if rank >= count:
        raise LabError(f"rank {rank} has no GPU of its own: there are {count}; choose a world size of at most {count}.")
    return torch.device("cuda", rank)


def num_gpus() -> int:
    """How many GPUs torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return int(psutil.virtual_memory().available)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """What a reader should see: ``NVIDIA H200`` or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({_cpu_model()}, {os.cpu_count()} cores)"


def environment(device: torch.device) -> dict[str, Any]:
    """Where a run was made: device, versions, clocks and power. JSON-ready; no host or user names."""
    env: dict[str, Any] = {
        "device_name": device_name(device),
        "num_devices": torch.cuda.device_count() if device.type == "cuda" else 0,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dspark_lab": _version(),
    }
    if device.type == "cuda":
        env["nvidia_smi"] = clocks(device)
    return env


def _cpu_model() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version() -> str:
    try:
        return metadata.version("dspark-lab")
    except metadata.PackageNotFoundError:
        return "source tree"


def clocks(device: torch.device) -> dict[str, str]:
    """Clocks, power and driver as nvidia-smi prints them; empty where it is not there."""
    query = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(query.split(","), (x.strip() for x in out.split(",")), strict=False))
