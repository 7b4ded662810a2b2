"""`Job`: a sweep on its way, outside this process. Poll it, stop it, wait for its runs; no torch in the caller."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.errors import LabError, RunFailed
from dspark_lab.runs.launch import Launch
from dspark_lab.runs.plan import Group
from dspark_lab.runs.record import STEP_COLUMNS, Acceptance, Run
from dspark_lab.runs.spec import Arm, JobSpec, Progress


class Job:
    """Runs ``groups`` one after the other, ``processes`` times in turn, in a thread; results are saved below ``out``."""

    def __init__(
        self, groups: list[Group], *, out: Path, processes: int, profile_processes: int = 1, **spec: Any
    ) -> None:
        self.out = out
        self.runs: list[Run] = []
        """All runs, aliases and A/A pairs included; filled when the job has ended, however it ended."""
        self.error: LabError | None = None
        self._groups = groups
        self._specs: list[tuple[int, JobSpec]] = []
        for p in range(processes):
            captures = p < profile_processes
            options = spec if captures else {**spec, "profile_steps": 0}
            self._specs += [(i, JobSpec(arms=g.arms, process=p, **options)) for i, g in enumerate(groups)]
        self._results: list[tuple[JobSpec, Path, list[dict[str, Any]]]] = []
        self._current: Launch | None = None
        self._finished = 0
        self._stop = threading.Event()
        self._done = threading.Event()
        self._ended_early = False
        self._state = "starting"
        self._thread = threading.Thread(target=self._main, name="dspark_lab job", daemon=True)
        self._thread.start()

    def poll(self) -> Progress:
        """Where it stands now; never blocks."""
        line = self._current.progress if self._current else {}
        fraction = (self._finished + float(line.get("fraction", 0.0))) / len(self._specs)
        state = self._state
        if state in ("complete", "stopped", "failed"):
            message = str(self.error) if self.error else state
            return Progress(state=state, fraction=1.0 if state == "complete" else min(fraction, 1.0), message=message)
        fields = {k: line[k] for k in ("arm", "process", "repeat", "step", "num_steps", "message") if k in line}
        return Progress(state="running" if "arm" in line else "starting", fraction=min(fraction, 1.0), **fields)

    def stop(self) -> None:
        """SIGTERM to the ranks, SIGKILL after 5 s; what was measured is kept as runs marked ``stopped``."""
        self._stop.set()

    def wait(self, timeout: float | None = None, *, on_progress: Callable[[Progress], None] | None = None) -> list[Run]:
        """Blocks until the end and returns the runs. Raises what ended the job early; Ctrl-C stops the job first."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._done.wait(0.1):
                if end is not None and time.monotonic() > end:
                    raise LabError(f"the job still runs after {timeout} s; wait longer, or stop() it.")
                if on_progress:
                    on_progress(self.poll())
        except LabError:
            raise
        except BaseException:  # Ctrl-C, or a callback that broke: nothing may go on unwatched
            self.stop()
            self._done.wait(15)
            raise
        if on_progress:
            on_progress(self.poll())
        if self.error:
            raise self.error
        for run in self.runs:
            if run.role == "arm" and run.mostly_padding:
                warnings.warn(run.mostly_padding, stacklevel=2)
        return self.runs

    # -- in the thread -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        state = "complete"
        try:
            for i, spec in self._specs:
                if self._stop.is_set():
                    break
                self._launch(i, spec)
                if self.error or self._ended_early:
                    break
        except LabError as e:
            self.error = e
        except Exception as e:  # whatever it is, the caller must see it
            self.error = RunFailed(f"the job broke: {type(e).__name__}: {e}")
        if self.error:
            state = "failed"
        elif self._stop.is_set() or self._ended_early:
            state = "stopped"
        try:
            self.runs = self._assemble(state)
        except Exception as e:
            broke = e if isinstance(e, LabError) else RunFailed(f"the runs cannot be saved: {type(e).__name__}: {e}")
            self.error, state = self.error or broke, "failed"
        self._tidy()
        self._state = state
        self._done.set()

    def _tidy(self) -> None:
        """Removes the job folders, whose contents now lie in the runs; keeps the logs of what broke."""
        if not isinstance(self.error, RunFailed):
            shutil.rmtree(self.out / ".jobs", ignore_errors=True)
        if self.out.is_dir() and not any(self.out.iterdir()):
            self.out.rmdir()

    def _launch(self, group: int, spec: JobSpec) -> None:
        folder = self.out / ".jobs" / f"{len(self._results):03d}"
        launch = self._current = Launch(spec, folder)
        try:
            while not launch.poll():
                if self._stop.is_set():
                    launch.stop()
                time.sleep(0.05)
            self.error = launch.failure()
            results = launch.results()
            self._ended_early = any(r["status"] == "stopped" for r in results)
            self._results.append((spec, folder, results))
        finally:
            launch.close()
        if not self._stop.is_set() and not self.error:
            self._finished += 1

    def _assemble(self, state: str) -> list[Run]:
        runs = []
        for g in self._groups:
            made: dict[str, Run] = {}
            for arm in g.arms:
                run = run_of(arm, [[(folder, r) for r in ranks] for _, folder, ranks in self._results], state)
                if run is not None:
                    made[arm.name] = run.save(self.out / arm.name)
            for arm, shared in g.aliases:
                if shared in made:
                    alias = replace(
                        made[shared], name=arm.name, config=arm.config, same_path_as=made[shared].config.engine.alloc
                    )
                    made[arm.name] = alias.save(self.out / arm.name)
            runs += made.values()
        return runs


def run_of(arm: Arm, processes: Sequence[Sequence[tuple[Path, dict[str, Any]]]], status: str) -> Run | None:
    """One arm over all ``processes``, each the results of its ranks with the folder they lie in; None where nothing of it
    was measured."""
    rows, accepted, proposed, digests, traces, ep, env, tokens = [], None, None, set(), [], [], {}, 0
    host: dict[str, list[float]] = {}
    clocks: list[dict[str, Any]] = []
    graphs: list[dict[str, Any]] = []
    for ranks in processes:
        for rank, (folder, result) in enumerate(ranks):
            part = result["arms"].get(arm.name)
            if part is None:
                continue
            rows += part["rows"]
            env, tokens = env or result["environment"], part["tokens"] or tokens
            digests |= set(part["digests"])
            traces += [folder / t for t in part["traces"]]
            clocks += part["clocks"]
            graphs = graphs or part["graphs"]
            for name, values in part["host"].items():
                host.setdefault(name, []).extend(values)
            if "ep" in part:
                ep.append(part["ep"])
            if rank % arm.config.parallel.rows_ranks == 0:  # the first of each attention replica
                accepted = _add(accepted, part["accepted"])
                proposed = _add(proposed, part["proposed"])
    if not rows:
        return None
    if len(digests) > 1:
        raise RunFailed(
            f"arm {arm.name}: blocks or ranks committed different tokens ({len(digests)} digests); outputs must be equal."
        )
    steps = pd.DataFrame(rows)[list(STEP_COLUMNS)].astype(STEP_COLUMNS)
    simulated = arm.config.engine.simulated_accept_length is not None and arm.config.gamma > 0
    return Run(
        name=arm.name,
        config=arm.config,
        source="measured",
        steps=steps,
        environment=env,
        acceptance=Acceptance(accepted=tuple(accepted or ()), proposed=tuple(proposed or ()), simulated=simulated),
        outputs={
            "digest": next(iter(digests), ""),
            "num_tokens": tokens,
            "host": _host(host),
            "clocks": clocks,
            "graphs": graphs,
        },
        ep=ep,
        status=status,
        role=arm.role,
        trace_paths=tuple(traces),
    )


def _host(values: dict[str, list[float]]) -> dict[str, float]:
    """Median host time of the scalar alone and mean of the busy work, in µs; a name only where it was measured."""
    out = {}
    if values.get("scalar_us"):
        out["scalar_us_p50"] = float(np.median(values["scalar_us"]))
    if values.get("host_work_us"):
        out["host_work_us_mean"] = float(np.mean(values["host_work_us"]))
    return out


def _add(total: list[int] | None, part: list[int]) -> list[int]:
    return list(part) if total is None else [a + b for a, b in zip(total, part, strict=True)]
