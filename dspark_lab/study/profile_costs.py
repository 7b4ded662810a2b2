"""`profile_costs`: what a round costs on this device by its load, measured with the engine's own rounds.

Every point drafts whole blocks and verifies the first drafts of each, so that only the width of the verify forward varies:
T(requests, tokens) with tokens = requests · width, anchors counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.device import environment, resolve, synchronize
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.replays import RoundGraphs
from dspark_lab.engine.request import check_config, workload
from dspark_lab.engine.rounds import Rounds
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.decoder import Target
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.models.weights import build
from dspark_lab.plan.sps import SpsProfile

BURST = 8
"""Rounds launched without a wait between them, where the host of the config runs ahead: a step is then a period."""


class CutRounds(Rounds):
    """Rounds over the caches, state and models of others, that draft whole blocks and verify ``width`` rows a request."""

    def __init__(self, whole: Rounds, width: int) -> None:
        self.__dict__.update(whole.__dict__)
        rows, device = len(whole.lengths), whole.device
        self.width = width
        self.drafts = torch.zeros(rows, width - 1, dtype=torch.int64, device=device)
        self.lengths = torch.full((rows,), width - 1, dtype=torch.int64, device=device)
        self.packed = torch.zeros(rows, width + 2, dtype=torch.int64, device=device)
        self.results, self.sent = self.packed, None
        self.executed_tokens = 0
        """Rows of the last verify forward that was built."""

    def draft(self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None) -> None:
        """γ draft tokens for the first ``b`` rows, of which the first ``width`` − 1 are kept."""
        batch = self.proposer.build_batch(
            self.draft_rows(b),
            max_keys=max_keys,
            num_requests=num_requests,
            num_token_non_padded=num_token_non_padded,
        )
        proposal = self.proposer.propose(batch, self.state.anchors[:b], with_confidence=self.with_confidence)
        self.drafts[:b].copy_(proposal.draft_tokens[:, : self.width - 1])

    def build_verify_batch(
        self, b: int, *, max_keys: int, num_requests: int, num_token_non_padded: Tensor | None
    ) -> ForwardBatch:
        batch = super().build_verify_batch(
            b, max_keys=max_keys, num_requests=num_requests, num_token_non_padded=num_token_non_padded
        )
        self.executed_tokens = batch.input_ids.numel()
        return batch


def profile_costs(
    cfg: LabConfig,
    *,
    requests: Sequence[int],
    tokens: Sequence[int] | None = None,
    num_steps: int = 16,
    warmup_steps: int = 3,
    models: tuple[Target, AnyDrafter] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SpsProfile:
    """Medians of ``num_steps`` rounds of ``cfg`` at each point of ``requests`` × ``tokens`` that can be: tokens a multiple of
    requests, by 1 to γ+1; None measures every width. Prompts are ``prompt_len`` long, ``batch_size`` is not read.

    The widths of one number of requests take turns, so that a drift meets all alike. Where the config says ``use_graph``, each
    is a pair of graphs; where it says ``overlap``, rounds are launched in bursts. ``environment["protocol"]`` says how it was
    measured, and the ``spread_pct`` of steps at one point: differences below it are noise. ``on_progress(done, all)`` after
    each number of requests. Raises `LabError` for a value that is in no point, for several ranks, and without drafts.
    """
    points = _points(cfg, requests, tokens)
    for name, value, least in (("num_steps", num_steps, 1), ("warmup_steps", warmup_steps, 0)):
        if not is_int(value) or value < least:
            raise LabError(f"{name}={shown(value)} is not a whole number of at least {least}.")
    device = resolve(cfg.engine.device)
    pair = models or build(cfg, device)
    measured: dict[tuple[int, int], list[float]] = {}
    loads = sorted({r for r, _ in points})
    for i, num_requests in enumerate(loads):
        widths = sorted(b // r for r, b in points if r == num_requests)
        times = _measure(cfg, pair, device, num_requests, widths, num_steps=num_steps, warmup_steps=warmup_steps)
        measured |= {(num_requests, num_requests * w): t for w, t in times.items()}
        if on_progress is not None:
            on_progress(i + 1, len(loads))
    protocol = {"num_steps": num_steps, "warmup_steps": warmup_steps, "prompt_len": cfg.engine.prompt_len, "burst": _burst(cfg, device),
                "layout": "padded: every request verifies equally many", "statistic": "median",
                "spread_pct": 100 * _spread(measured)}  # fmt: skip
    return SpsProfile(
        requests=tuple(r for r, _ in points),
        tokens=tuple(b for _, b in points),
        seconds=tuple(float(np.median(measured[p])) for p in points),
        block_size=cfg.model.drafter.block_size,
        config=cfg.to_dict(),
        environment={"device": device.type, **environment(device), "protocol": protocol},
    )


def _points(cfg: LabConfig, requests: Sequence[int], tokens: Sequence[int] | None) -> list[tuple[int, int]]:
    """(requests, tokens) that can be measured, rising."""
    check_config(cfg)
    for name, values in (("requests", requests), ("tokens", tokens)):
        if isinstance(values, str) or not (
            isinstance(values, Sequence | np.ndarray) or (values is None and name == "tokens")
        ):
            raise LabError(f"{name}={shown(values)} is not a list of whole numbers, such as [1, 4, 16].")
    if not cfg.gamma:
        raise LabError("speculate=False drafts nothing, so there is nothing to schedule; choose speculate=True.")
    if cfg.parallel.world_size > 1:
        raise LabError(
            f"profile_costs measures one rank, and this config has {cfg.parallel.world_size}; set ep_size, tp_size and attn_dp to 1."
        )
    for name, values in (("requests", requests), ("tokens", tokens)):
        for value in values if values is not None else ():
            if not is_int(value) or value < 1:
                raise LabError(f"{name} holds {shown(value)}; loads are whole numbers of at least 1.")
    if not len(requests):
        raise LabError("requests is empty; give the numbers of requests to measure at, such as [1, 4, 16].")
    widths = range(1, cfg.gamma + 2)
    points = sorted({(r, r * w) for r in requests for w in widths if tokens is None or r * w in tokens})
    for name, values, used in (
        ("requests", requests, {r for r, _ in points}),
        ("tokens", tokens, {b for _, b in points}),
    ):
        if lost := sorted(set(values or ()) - used):
            raise LabError(
                f"{name}={lost[0]} is in no point: tokens are requests times 1 to {cfg.gamma + 1} (block_size={cfg.gamma} and "
                f"the anchor), here {sorted(set(requests))} requests; leave tokens out to measure every width."
            )
    return points


def _measure(
    cfg: LabConfig,
    models: tuple[Target, AnyDrafter],
    device: torch.device,
    num_requests: int,
    widths: list[int],
    *,
    num_steps: int,
    warmup_steps: int,
) -> dict[int, list[float]]:
    """Seconds a round, ``num_steps`` of each of ``widths``, of ``num_requests`` requests whose prompts are in the caches."""
    eager = cfg.replace(
        batch_size=num_requests, use_graph=False, overlap=False, simulated_accept_length=None, alloc="none",
        verify="static", layout="padded", confidence_threshold=0.0, sps_path=None, sts_path=None, temperature=0.0, top_k=0,
        top_p=1.0, stop_token_ids=(),
    )  # fmt: skip
    if cfg.model.drafter.enable_confidence_head:  # a schedule reads confidences, so they are computed here too
        eager = eager.replace(verify="threshold", confidence_threshold=1e-9)
    with torch.inference_mode():
        engine = DecodeEngine(eager, *models, device)
        waiting = workload(eager)
        engine.admit(lambda _: next(waiting))
        engine.drain()
        table, times = engine.rounds.state.table, {w: [] for w in widths}
        before = table.clone()
        rounds = {w: _Round(CutRounds(engine.rounds, w), cfg, num_requests) for w in widths}
        burst = _burst(cfg, device)
        try:
            for step in range(-warmup_steps, num_steps):
                for width in widths if step % 2 else reversed(widths):
                    taken = _timed(rounds[width], device, burst, lambda: table.copy_(before))
                    if step >= 0:
                        times[width].append(taken)
        finally:
            for r in rounds.values():
                r.close()
            engine.close()
    return times


class _Round:
    """One round of `CutRounds`, eager or as a pair of graphs."""

    def __init__(self, rounds: CutRounds, cfg: LabConfig, num_requests: int) -> None:
        self.rounds, self.num_requests = rounds, num_requests
        self.max_keys = min(cfg.engine.prompt_len + 2 * (cfg.gamma + 1), cfg.model.context_len)
        self.graphs = RoundGraphs(rounds, cfg, buckets=[num_requests]) if cfg.engine.use_graph else None

    def __call__(self) -> None:
        n = self.num_requests
        if self.graphs is not None:
            self.graphs.draft(n, None)
            self.graphs.verify(n)
        else:
            load: dict[str, Any] = {"max_keys": self.max_keys, "num_requests": n, "num_token_non_padded": None}
            self.rounds.draft(n, **load)
            self.rounds.verify(n, **load)

    def check_executed(self) -> None:
        """Raises `LabError` unless the verify forward had as many rows as were asked for."""
        wanted = self.num_requests * self.rounds.width
        if self.rounds.executed_tokens != wanted:
            raise LabError(
                f"the engine verified {self.rounds.executed_tokens} tokens where {wanted} were asked for, so its times are of another "
                "load; this is a fault of the profiler."
            )

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.destroy()


def _timed(round_: _Round, device: torch.device, burst: int, restore: Callable[[], Any]) -> float:
    """Seconds of a round, over ``burst`` of them, each from the same state."""
    restore()
    synchronize(device)
    start = time.perf_counter_ns()
    for i in range(burst):
        if i:
            restore()
        round_()
    synchronize(device)
    taken = (time.perf_counter_ns() - start) / 1e9 / burst
    round_.check_executed()
    return taken


def _spread(measured: dict[tuple[int, int], list[float]]) -> float:
    """How far the middle half of a point's steps reaches, over their median: the median of it over points."""
    quartiles = np.array([np.percentile(t, [25, 50, 75]) for t in measured.values()])
    return float(np.median((quartiles[:, 2] - quartiles[:, 0]) / quartiles[:, 1]))


def _burst(cfg: LabConfig, device: torch.device) -> int:
    return BURST if cfg.engine.overlap and device.type == "cuda" else 1
