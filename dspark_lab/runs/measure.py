"""Blocks of decode steps: timed without the profiler, or captured with it. One rank's view; no files but the trace."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_lab import device as hardware
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.flights import Round
from dspark_lab.engine.request import Request, workload
from dspark_lab.ep.timing import ExchangeTimes, Timed

CAPTURE_WARMUP = 2


class Stopped(Exception):
    """The job was asked to stop; what was measured so far is kept."""


@dataclass(kw_only=True)
class Block:
    """Rows of the step table and what the steps committed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    accepted: np.ndarray
    proposed: np.ndarray
    digest: str = ""
    num_tokens: int = 0
    host: dict[str, list[float]] = field(default_factory=dict)
    """``scalar_us`` and ``host_work_us`` of each step: host time of the scalar alone, and of the busy work after it."""
    stopped: bool = False
    """The block ended early: its rows count, its digest compares with nothing."""


class Stepper:
    """Runs steps of one engine over the endless workload, and keeps what they committed."""

    def __init__(self, engine: DecodeEngine, on_step: Callable[[int], None]) -> None:
        self.engine = engine
        self.on_step = on_step
        gamma = engine.gamma
        self.block = Block(accepted=np.zeros(gamma + 1, dtype=np.int64), proposed=np.zeros(gamma + 1, dtype=np.int64))
        size = engine.cfg.engine.batch_size
        self._requests = {slot: workload(engine.cfg, first=slot, stride=size) for slot in engine.slots}
        self._joined: list[tuple[int, int, Request]] = []
        """(turn, slot, request)."""
        engine.reset()
        self.refill()

    def refill(self) -> bool:
        """Prefills new requests into free slots, outside any timed region; True if there were any, on any rank."""
        return bool(self.engine.admit(self._next))

    def _next(self, slot: int) -> Request:
        request = next(self._requests[slot])
        self._joined.append((sum(s == slot for _, s, _ in self._joined), slot, request))
        return request

    def row(self, step: int, **values: Any) -> None:
        """A row of the step table; its round's counts follow when the results arrive."""
        self.block.rows.append({"step": step, "num_requests": 0, "num_committed": 0, **values})

    def count(self, done: list[Round], *, first: int) -> None:
        """Adds rounds from number ``first`` on to the acceptance histograms and to their rows."""
        for r in done:
            if r.index < first:
                continue
            np.add.at(self.block.accepted, np.array(r.accept_lengths, dtype=np.int64) - 1, 1)
            np.add.at(self.block.proposed, np.array(r.proposal_lengths, dtype=np.int64), 1)
            if r.index - first < len(self.block.rows):
                counts = {"num_requests": len(r.accept_lengths), "num_committed": sum(r.accept_lengths)}
                self.block.rows[r.index - first].update(counts)

    def close(self) -> Block:
        """Digest of all committed tokens, of all replicas: each slot's first request, each slot's second, and so on."""
        mine = [(turn, slot, r.new_tokens) for turn, slot, r in self._joined]
        digest = hashlib.sha256()
        for _, _, tokens in sorted(self.engine.of_all_replicas(mine)):
            digest.update(np.array(tokens, dtype=np.int64).tobytes() + b"|")
            self.block.num_tokens += len(tokens)
        self.block.digest = digest.hexdigest()
        return self.block


@torch.inference_mode()
def timed_block(engine: DecodeEngine, *, num_steps: int, warmup: int, on_step: Callable[[int], None]) -> Block:
    """``num_steps`` unprofiled steps after ``warmup``. A step is wall time on a CPU, a period between events on a GPU."""
    stepper = Stepper(engine, on_step)
    clock = _GpuClock() if engine.device.type == "cuda" else _HostClock()
    try:
        for i in range(warmup + num_steps):
            joined = stepper.refill()
            clock.start(joined)
            done = engine.step()
            clock.stop()
            if i >= warmup:
                stepper.row(i - warmup)
            stepper.count(done, first=warmup)
            on_step(i)
    except Stopped:
        stepper.block.stopped = True
    stepper.count(engine.drain(), first=warmup)
    scalar = [ns / 1e3 for ns in engine.rounds.proposer.scalar.host_ns[warmup:]]
    stepper.block.host = {"scalar_us": scalar, "host_work_us": engine.host_work_us[warmup:]}
    for row, (step_us, host_us) in zip(stepper.block.rows, clock.read()[warmup:], strict=True):
        row.update(step_us=step_us, host_us=host_us, profiled=False)
    return stepper.close()


def _save_trace(profiler: Any, path: Path) -> None:
    """The capture as ``path`` (.json.gz), whole or not at all. Given that name, torch compresses line by line: ten times as long."""
    plain, half = path.with_suffix(".plain"), path.with_suffix(".part")
    profiler.export_chrome_trace(str(plain))
    with open(plain, "rb") as source, gzip.open(half, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    plain.unlink()
    half.replace(path)


@torch.inference_mode()
def captured_block(
    engine: DecodeEngine, *, num_steps: int, folder: Path, rank: int, on_step: Callable[[int], None]
) -> tuple[Block, Path]:
    """``num_steps`` steps under torch.profiler with phases named; the trace lies in ``folder``, one file a rank."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (engine.device.type == "cuda")
    stepper = Stepper(engine, on_step)
    path = folder / f"rank{rank}_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    hardware.synchronize(engine.device)
    hardware.name_phases(True)
    try:
        with (
            hardware.one_cycle(),
            profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=CAPTURE_WARMUP, active=num_steps, repeat=1),
                on_trace_ready=lambda p: _save_trace(p, path),
            ) as prof,
        ):
            prof.add_metadata_json("dspark_lab", '{"profiled": true}')
            clock = _HostClock()
            for i in range(CAPTURE_WARMUP + num_steps):
                stepper.refill()
                clock.start(False)
                done = engine.step()
                clock.stop()
                if i >= CAPTURE_WARMUP:
                    stepper.row(i - CAPTURE_WARMUP, profiled=True)
                stepper.count(done, first=CAPTURE_WARMUP)
                on_step(i)
                if i == CAPTURE_WARMUP + num_steps - 1:
                    hardware.synchronize(engine.device)
                prof.step()
        stepper.count(engine.drain(), first=CAPTURE_WARMUP)
    finally:
        hardware.name_phases(False)
    for row, (step_us, host_us) in zip(stepper.block.rows, clock.read()[CAPTURE_WARMUP:], strict=True):
        row.update(step_us=step_us, host_us=host_us)
    return stepper.close(), path


@torch.inference_mode()
def counted_block(engine: DecodeEngine, *, num_steps: int, on_step: Callable[[int], None]) -> dict[str, Any]:
    """Expert load over ``num_steps`` eager steps, prefills left out; apart from the timed blocks, since counting costs kernels."""
    loads = {"target": engine.target.watch_load(), "drafter": engine.drafter.watch_load()}
    graphs, engine.graphs = engine.graphs, None  # a captured graph holds no counters
    layers = {"target": engine.target.model.moe_layers, "drafter": engine.drafter.moe_layers}
    times = ExchangeTimes(ranks=engine.groups.moe, device=engine.device)
    for layer in (*layers["target"], *layers["drafter"]):
        layer.dispatcher = Timed(layer.dispatcher, times)
    try:
        stepper = Stepper(engine, on_step)
        for load in loads.values():
            if load is not None:
                load.reset()
        times.start_over()
        for i in range(num_steps):
            stepper.refill()
            engine.step()
            on_step(i)
        engine.drain()
    finally:
        engine.graphs = graphs
        for layer in (*layers["target"], *layers["drafter"]):
            layer.load, layer.dispatcher = None, layer.dispatcher.inner  # pyright: ignore[reportAttributeAccessIssue]
    ep_rank = engine.groups.moe.rank // engine.cfg.parallel.moe_tp
    report = {who: load.report(ep_rank) for who, load in loads.items() if load is not None}
    for who, part in report.items():
        part["experts"] = [list(layer.experts.expert_ids) for layer in layers[who]]
    return {
        "num_steps": num_steps,
        "exchange": times.report(num_steps),
        "real_rows": engine.num_real_rows,
        "padded_rows": engine.num_padded_rows,
        "rows_computed": sum(sum(map(sum, r["rows"])) for r in report.values()),
        "bytes_sent": sum(r["bytes_sent"] for r in report.values()),
        "expert_bytes": sum(m.num_bytes for m in (*engine.target.model.moe_layers, *engine.drafter.moe_layers)),
        **report,
    }


class _HostClock:
    """Wall time of the loop body."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._t0 = 0

    def start(self, joined: bool) -> None:
        self._t0 = time.perf_counter_ns()

    def stop(self) -> None:
        self._times.append((time.perf_counter_ns() - self._t0) / 1e3)

    def read(self) -> list[tuple[float, float]]:
        """(step_us, host_us) of each step."""
        return [(t, t) for t in self._times]


class _GpuClock(_HostClock):
    """Period from one step's start event to the next one's; to its own end where requests joined in between."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, joined: bool) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._marks.append((joined, begin, end))
        super().start(joined)

    def stop(self) -> None:
        super().stop()
        self._marks[-1][2].record()

    def read(self) -> list[tuple[float, float]]:
        torch.cuda.synchronize()
        steps = []
        for i, (_, begin, end) in enumerate(self._marks):
            following = self._marks[i + 1] if i + 1 < len(self._marks) else None
            until = end if following is None or following[0] else following[1]
            steps.append(1e3 * begin.elapsed_time(until))
        return list(zip(steps, self._times, strict=True))
