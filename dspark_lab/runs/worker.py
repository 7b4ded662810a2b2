"""One rank of a job: ``python -m dspark_lab.runs.worker FOLDER``, started by torch.distributed.run. Reads job.json, writes results."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dspark_lab import device as hardware
from dspark_lab.config import LabConfig
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.runnable import check_runnable
from dspark_lab.ep.control import WAIT_LIMIT_S
from dspark_lab.ep.groups import process_groups
from dspark_lab.errors import LabError, RunFailed
from dspark_lab.models.weights import build
from dspark_lab.plan.memory import plan_memory
from dspark_lab.plan.padding import bucket_for, slots_of, usable_buckets
from dspark_lab.runs.balance import loads_for
from dspark_lab.runs.measure import Block, Stopped, captured_block, counted_block, timed_block
from dspark_lab.runs.plan import arm_name
from dspark_lab.runs.spec import Arm, JobSpec, write_json

STOP_EVERY = 4
"""Steps between two looks at the stop flag, which the ranks agree on."""
LOAD_STEPS = 16
"""Steps that count expert load, after the timed blocks."""


class Worker:
    """Builds the weights once, then runs all arms' blocks in turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = JobSpec.load(folder)
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.where = "start-up"
        self.stop_asked = False
        self.done_steps = 0
        self.results: dict[str, dict[str, Any]] = {}
        self._last_progress = 0.0

    def run(self) -> str:
        """All blocks, then the captures; returns ``complete`` or ``stopped``. Results are written either way."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._progress("starting", message="building weights")
        engines = self._engines()
        self.groups.limit_waits(self.spec.wait_limit_s)
        status = "complete"
        try:
            for repeat in range(self.spec.repeats):
                for i in self.spec.order(repeat):
                    self._block(self.spec.arms[i], engines[i], repeat)
                self._write("running")
            for arm, engine in zip(self.spec.arms, engines, strict=True):
                if arm.role == "arm":
                    if not self.spec.process:
                        self._count_load(arm, engine)
                    if self.spec.profile_steps:
                        self._capture(arm, engine)
        except Stopped:
            status = "stopped"
        except RuntimeError as e:
            raise self._who_is_missing(e) or e from e
        self._write(status)
        return status

    def _who_is_missing(self, error: RuntimeError) -> RunFailed | None:
        """The rank that a collective waited for in vain; None where ``error`` is of another kind."""
        control = self.groups.control
        if control is None or "timed out" not in str(error).lower():
            return None
        return control.nobody_came(f"a collective of {self.where}", self.spec.wait_limit_s)

    # -- set-up ------------------------------------------------------------------------------------------------

    def _engines(self) -> list[DecodeEngine]:
        cfg = self.spec.arms[0].config
        for arm in self.spec.arms:
            check_runnable(arm.config)
        self.device = hardware.resolve(cfg.engine.device, rank=self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self._join_group()
        self._check_memory()
        self.models = build(cfg, self.device, self.groups, loads=loads_for(cfg, self.device, self.groups))
        return [self._engine(arm.config) for arm in self.spec.arms]

    def _engine(self, cfg: LabConfig) -> DecodeEngine:
        """Measured batches are always full, so one bucket's graphs are enough."""
        self.where = f"capturing graphs of {arm_name(cfg)}" if cfg.engine.use_graph else "start-up"
        fullest = len(slots_of(cfg.engine.batch_size, cfg.parallel.attn_dp, 0))
        bucket = bucket_for(fullest, usable_buckets(cfg.engine.buckets, cfg.parallel))
        return DecodeEngine(cfg, *self.models, self.device, buckets=[bucket], groups=self.groups)

    def _join_group(self) -> None:
        if self.world > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            device_id = self.device if self.device.type == "cuda" else None
            dist.init_process_group(backend, timeout=timedelta(seconds=WAIT_LIMIT_S), device_id=device_id)
        self.groups = process_groups(self.spec.arms[0].config.parallel, self.device)

    def _check_memory(self) -> None:
        """Refuses what does not fit on the fullest rank, on all ranks alike."""
        plan, free = plan_memory(self.spec.arms[0].config), hardware.free_bytes(self.device)
        if self.groups.control is not None:
            free = min(free for (free,) in self.groups.control.gather([free], "the check of free memory"))
        share = free if self.device.type == "cuda" else free // self.world
        if plan.weights_bytes + plan.cache_bytes > share:
            raise LabError(
                f"preset {self.spec.arms[0].config.preset!r} needs {plan.total_bytes / 2**30:.1f} GiB a rank and "
                f"{share / 2**30:.1f} GiB are free on {self.device}; choose the preset 'tiny', or fewer layers or experts."
            )

    # -- blocks ------------------------------------------------------------------------------------------------

    def _block(self, arm: Arm, engine: DecodeEngine, repeat: int) -> None:
        self.where = f"arm {arm.name}, block {repeat + 1} of {self.spec.repeats}"
        on_step = self._on_step(arm, repeat)
        block = timed_block(engine, num_steps=self.spec.num_steps, warmup=self.spec.warmup_steps, on_step=on_step)
        self._keep(arm, engine, block, repeat)
        if block.stopped:
            raise Stopped

    def _count_load(self, arm: Arm, engine: DecodeEngine) -> None:
        self.where = f"arm {arm.name}, counting expert load"
        if engine.cfg.model.target.num_experts or engine.cfg.model.draft.num_experts:
            load = counted_block(engine, num_steps=LOAD_STEPS, on_step=self._on_step(arm, self.spec.repeats))
            self.results[arm.name]["ep"] = {"rank": self.rank, **load}

    def _capture(self, arm: Arm, engine: DecodeEngine) -> None:
        self.where = f"arm {arm.name}, profiled capture"
        folder = self.folder / "traces" / arm.name
        block, path = captured_block(
            engine,
            num_steps=self.spec.profile_steps,
            folder=folder,
            rank=self.rank,
            on_step=self._on_step(arm, self.spec.repeats),
        )
        self._keep(arm, engine, block, 0)
        self.results[arm.name]["traces"].append(str(path.relative_to(self.folder)))

    def _keep(self, arm: Arm, engine: DecodeEngine, block: Block, repeat: int) -> None:
        new = {
            "rows": [],
            "accepted": block.accepted * 0,
            "proposed": block.proposed * 0,
            "digests": [],
            "traces": [],
            "tokens": 0,
            "host": {"scalar_us": [], "host_work_us": []},
            "clocks": [],
            "graphs": [],
        }
        kept = self.results.setdefault(arm.name, new)
        kept["rows"] += [
            {"process": self.spec.process, "repeat": repeat, "rank": self.rank, **row} for row in block.rows
        ]
        if not block.rows or not block.rows[0]["profiled"]:
            kept["accepted"] += block.accepted
            kept["proposed"] += block.proposed
            kept["digests"] += [] if block.stopped else [block.digest]
            kept["tokens"] = block.num_tokens
            for name, values in block.host.items():
                kept["host"][name] += values
            kept["graphs"] = engine.graphs.report() if engine.graphs is not None else []
            kept["clocks"].append({"process": self.spec.process, "repeat": repeat, "rank": self.rank, **self._clocks()})

    def _clocks(self) -> dict[str, str]:
        """Clocks and power just after a block, as the driver tells them."""
        return hardware.clocks(self.device) if self.device.type == "cuda" else {}

    def _on_step(self, arm: Arm, repeat: int):
        def on_step(step: int) -> None:
            self.done_steps += 1
            if step % STOP_EVERY == 0 and self._agreed_stop():
                raise Stopped
            now = time.monotonic()
            if now - self._last_progress > 0.1:
                self._last_progress = now
                self._progress("running", arm=arm.name, repeat=repeat, step=step)

        return on_step

    def _agreed_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer at the same step."""
        control = self.groups.control
        if control is None:
            return self.stop_asked
        return any(asked for (asked,) in control.gather([int(self.stop_asked)], "the look at the stop flag"))

    def _on_sigterm(self, *_: object) -> None:
        self.stop_asked = True

    # -- files -------------------------------------------------------------------------------------------------

    def _write(self, status: str) -> None:
        arms = {
            name: {**r, "accepted": r["accepted"].tolist(), "proposed": r["proposed"].tolist()}
            for name, r in self.results.items()
        }
        env = hardware.environment(self.device) | {"device": self.device.type, "world_size": self.world}
        write_json(self.folder / f"result.rank{self.rank}.json", {"status": status, "environment": env, "arms": arms})

    def _progress(self, state: str, **fields: Any) -> None:
        if self.rank:
            return
        line = {
            "state": state,
            "fraction": self.done_steps / max(self.spec.total_steps, 1),
            "process": self.spec.process,
            "num_steps": self.spec.num_steps + self.spec.warmup_steps,
            **fields,
        }
        with open(self.folder / "progress.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")


def die_with(parent_pid: int) -> None:
    """Ends this process when its launcher is gone, so that no rank outlives the notebook that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the launcher of this rank

    def alive() -> bool:
        try:
            return psutil.Process(parent_pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def watch() -> None:
        while alive():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> int:
    """Runs one rank; an error is left in ``error.rank{r}.json`` with the place where it happened."""
    rank = int(os.environ.get("RANK", "0"))
    terminal = os.dup(2)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    write_json(folder / f"pid.rank{rank}.json", {"pid": os.getpid()})
    die_with(int(os.environ.get("DSPARK_LAB_PARENT", str(os.getppid()))))
    worker = None
    try:
        worker = Worker(folder)
        worker.run()
    except BaseException as e:
        traceback.print_exc()
        error = {
            "rank": rank,
            "user": isinstance(e, LabError) and not isinstance(e, RunFailed),
            "told": isinstance(e, RunFailed),
            "message": str(e) or type(e).__name__,
            "type": type(e).__name__,
            "where": worker.where if worker else "start-up",
            "at": time.time(),
        }
        write_json(folder / f"error.rank{rank}.json", error)
        os.write(terminal, f"rank {rank}: {error['message']}\n".encode())  # where torchrun was called by hand
        os._exit(3)
    sys.stdout.flush()
    os._exit(0)  # results are on disk; a process group that does not shut down must not hold the job


if __name__ == "__main__":
    main(Path(sys.argv[1]))
