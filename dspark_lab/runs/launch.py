"""One job folder's process tree: the ranks below torch.distributed.run, or one rank; watched, stopped, never left behind. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from dspark_lab.errors import LabError, RunFailed
from dspark_lab.runs.spec import JobSpec

KILL_AFTER_S = 5.0
"""From Stop (SIGTERM to the ranks) to SIGKILL of the whole tree."""
GRACE_S = 3.0
"""From the first dead rank to the end of the others."""


def agent_command(world_size: int, folder: Path) -> list[str]:
    """Command line of the process that starts the ranks of the job in ``folder`` and ends when they have ended.

    One rank has nobody to meet and is started by itself: the agent would only import torch once more, some three seconds.
    """
    worker = ["-m", "dspark_lab.runs.worker", str(folder)]
    if world_size == 1:
        return [sys.executable, *worker]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={world_size}",
            "--max-restarts=0", "--monitor-interval=0.05", *worker]  # fmt: skip


class Launch:
    """Starts the ranks of ``spec`` with ``folder`` as their job folder."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        folder.mkdir(parents=True)
        spec.save(folder)
        command = agent_command(spec.world_size, folder.resolve())
        env = {**os.environ, "DSPARK_LAB_PARENT": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        if spec.world_size == 1:
            env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        if spec.arms[0].config.engine.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        with open(folder / "agent.log", "wb") as log:
            self._agent = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._tree: dict[int, psutil.Process] = {}
        self._stopped_at: float | None = None
        self._dead_at: float | None = None
        self._dead_ranks: list[int] = []

    def stop(self) -> None:
        """Asks the ranks to stop at the next step they agree on; what they measured is kept."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._signal_ranks()

    def poll(self) -> bool:
        """Looks after the tree once; True when all of it has ended."""
        self._remember()
        now = time.monotonic()
        ranks = range(self.spec.world_size)
        ended = self._agent.poll() is not None or all(map(self._finished, ranks))  # an agent takes its time to end
        dead = [r for r in ranks if self._rank_is_dead(r)]
        if dead and self._dead_at is None:
            self._dead_at, self._dead_ranks = now, dead
        if ended:
            self._kill_tree()
            return True
        if self._stopped_at is not None:
            self._signal_ranks()
        late = self._stopped_at is not None and now - self._stopped_at > KILL_AFTER_S
        if late or (self._dead_at is not None and now - self._dead_at > GRACE_S):
            self._kill_tree()
            return True
        return False

    def close(self) -> None:
        """Ends whatever still runs."""
        self._remember()
        self._kill_tree()

    @property
    def progress(self) -> dict[str, Any]:
        """The last line of progress.jsonl; empty before the first."""
        path = self.folder / "progress.jsonl"
        try:
            with open(path, "rb") as f:
                f.seek(max(path.stat().st_size - 4096, 0))
                lines = f.read().decode().strip().splitlines()
            return json.loads(lines[-1]) if lines else {}
        except (OSError, ValueError):
            return {}

    def results(self) -> list[dict[str, Any]]:
        """``result.rank*.json`` of all ranks that left one, by rank."""
        paths = [self.folder / f"result.rank{r}.json" for r in range(self.spec.world_size)]
        return [json.loads(p.read_text()) for p in paths if p.exists()]

    def failure(self) -> LabError | None:
        """Why the job ended before its time, in one line; None where it completed or was stopped."""
        results = self.results()
        if len(results) == self.spec.world_size and all(r["status"] in ("complete", "stopped") for r in results):
            return None
        if self._stopped_at is not None:
            return None
        errors = sorted(
            (json.loads(p.read_text()) for p in self.folder.glob("error.rank*.json")), key=lambda e: e["at"]
        )
        own = [e for e in errors if e["user"]]
        if own:
            return LabError(own[0]["message"])
        told = [e for e in errors if e.get("told")]  # what the ranks found out about each other
        if told:
            return RunFailed(f"{told[0]['message']} Log: {self._log(told[0]['rank'])}")
        silent = [r for r in self._dead_ranks if not (self.folder / f"error.rank{r}.json").exists()]
        where = self._where()
        if silent:
            return RunFailed(
                f"rank {silent[0]} of {self.spec.world_size} was killed {where}; the job was ended. Log: {self._log(silent[0])}"
            )
        if errors:
            e = errors[0]
            return RunFailed(
                f"rank {e['rank']} failed at {e['where']}: {e['type']}: {e['message']}. Log: {self._log(e['rank'])}"
            )
        return RunFailed(f"the ranks ended {where} without results. Log: {self.folder / 'agent.log'}")

    # -- the tree ----------------------------------------------------------------------------------------------

    def _where(self) -> str:
        p = self.progress
        return f"at arm {p['arm']}, block {p['repeat'] + 1}, step {p['step']}" if "arm" in p else "at start-up"

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def _rank_process(self, rank: int) -> psutil.Process | None:
        path = self.folder / f"pid.rank{rank}.json"
        if not path.exists():
            return None
        return self._tree.get(json.loads(path.read_text())["pid"])

    def _rank_is_dead(self, rank: int) -> bool:
        if not (self.folder / f"pid.rank{rank}.json").exists() or self._finished(rank):
            return False
        process = self._rank_process(rank)
        if process is None:
            return not psutil.pid_exists(json.loads((self.folder / f"pid.rank{rank}.json").read_text())["pid"])
        return _is_gone(process)

    def _finished(self, rank: int) -> bool:
        path = self.folder / f"result.rank{rank}.json"
        return path.exists() and json.loads(path.read_text())["status"] != "running"

    def _remember(self) -> None:
        """Notes every process of the tree while its parents are known: a killed agent leaves orphans."""
        try:
            root = psutil.Process(self._agent.pid)
            for p in [root, *root.children(recursive=True)]:
                self._tree.setdefault(p.pid, p)
        except psutil.NoSuchProcess:
            pass

    def _signal_ranks(self) -> None:
        for rank in range(self.spec.world_size):
            process = self._rank_process(rank)
            if process is not None and not self._finished(rank):
                _send(process, signal.SIGTERM)

    def _kill_tree(self) -> None:
        for process in self._tree.values():
            _send(process, signal.SIGKILL)
        if self._agent.poll() is None:
            self._agent.kill()
        self._agent.wait()
        end = time.monotonic() + 5
        while time.monotonic() < end and not all(map(_is_gone, self._tree.values())):
            time.sleep(0.01)


def _is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; who reaps a rank whose agent was killed may take a second or two, which nobody need wait for."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _send(process: psutil.Process, sig: signal.Signals) -> None:
    try:
        if process.is_running():
            process.send_signal(sig)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass
