"""`SpsProfile`: measured step times T(requests, tokens) of one model on one device, stored with where they come from.

The paper profiles SPS(B), steps a second at B tokens, once. Here the points are kept as they were measured; `step_table` and
`additive` make of them what a scheduler reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.config.shipped import data_dir
from dspark_lab.errors import LabError, unknown
from dspark_lab.plan.costs import AdditiveTable, Costs, StepTable, check_probes, check_seconds
from dspark_lab.plan.fit import nonnegative_least_squares
from dspark_lab.plan.table_files import read_table, write_table

KIND, SCHEMA = "sps_profile", 1
FREE = ("preset", "seed", "batch_size", "prompt_len", "max_new_tokens", "context_len", "buckets", "weights", "target_path",
        "drafter_path", "verify", "layout", "sps_path", "sts_path", "temperature", "text", "top_k", "top_p", "stop_token_ids",
         "confidence_threshold", "simulated_accept_length", "device", "alloc", "expert_load",
        "host_work_us")  # fmt: skip
"""Toggles that may differ between a profile and the config it is used for; its shapes, ranks and engine may not."""


@dataclass(frozen=True, kw_only=True)
class SpsProfile:
    """Points (requests, tokens, seconds); tokens count rows of the verify forward, anchors included: R to R·(γ+1)."""

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    """Median step of each point."""
    block_size: int
    """γ: drafts that every step of every point drafts, however few of them it verifies."""
    config: dict[str, Any] = field(default_factory=dict)
    """Flat toggles of the config that was measured, as `LabConfig.to_dict`."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Device, versions, clocks, time; ``protocol`` says how it was measured."""
    source: str = "measured"

    def __post_init__(self) -> None:
        if not is_int(self.block_size) or self.block_size < 1:
            raise LabError(f"block_size={shown(self.block_size)} is not a whole number of at least 1.")
        for name in ("config", "environment"):
            if not isinstance(value := getattr(self, name), dict):
                raise LabError(f"{name}={shown(value)} of an SPS profile is not values by name.")
        sizes = {"requests": len(self.requests), "tokens": len(self.tokens), "seconds": len(self.seconds)}
        if len(set(sizes.values())) > 1 or not self.requests:
            raise LabError(f"an SPS profile has one value a point, and a point at least; here are {sizes}.")
        check_seconds("seconds", self.seconds)
        for r, b in self.points:
            check_probes("requests", (r,))
            check_probes("tokens", (b,))
            if not r <= b <= r * (self.block_size + 1):
                raise LabError(
                    f"{b} tokens for {r} requests cannot be: with block_size={self.block_size} each has 1 to "
                    f"{self.block_size + 1}; the table is of another block size."
                )
        if len(set(self.points)) < len(self.points):
            raise LabError("an SPS profile holds a point twice; each (requests, tokens) stands once.")

    @property
    def points(self) -> list[tuple[int, int]]:
        """(requests, tokens) of each point."""
        return list(zip(self.requests, self.tokens, strict=True))

    # -- what a scheduler reads ------------------------------------------------------------------------------------

    def step_table(self, num_requests: int | None = None) -> StepTable:
        """T by tokens as measured at ``num_requests``; None takes all points, where no token count was measured twice."""
        rows = [i for i, r in enumerate(self.requests) if num_requests in (None, r)]
        tokens = [self.tokens[i] for i in rows]
        if not rows:
            raise LabError(
                f"num_requests={num_requests} was not measured; there are {sorted(set(self.requests))}, and additive() interpolates."
            )
        if len(set(tokens)) < len(tokens):
            twice = sorted({b for b in tokens if tokens.count(b) > 1})
            raise LabError(
                f"{twice[0]} tokens were measured at several numbers of requests, and a step table knows one time; choose "
                f"num_requests of {sorted(set(self.requests))}, or additive()."
            )
        rows.sort(key=lambda i: self.tokens[i])
        return StepTable(tokens=tuple(self.tokens[i] for i in rows), seconds=tuple(self.seconds[i] for i in rows))

    def additive(self) -> AdditiveTable:
        """T = bias + α(requests) + θ(tokens), by least squares of relative errors; α and θ start at 0 and never fall, since a
        schedule would take noise that makes more work cheaper for an offer.

        Raises `LabError` where the points do not tie α and θ together. `misfit` says how far off the table is.
        """
        requests, tokens = sorted(set(self.requests)), sorted(set(self.tokens))
        seconds = np.asarray(self.seconds)
        above_request = np.asarray(self.requests)[:, None] >= requests[1:]
        above_tokens = np.asarray(self.tokens)[:, None] >= tokens[1:]
        system = np.hstack([np.ones((len(seconds), 1)), above_request, above_tokens]) / seconds[:, None]
        if np.linalg.matrix_rank(system) < system.shape[1]:
            raise LabError(
                f"{len(seconds)} points of requests {requests} and tokens {tokens} do not tie the two together; measure more "
                "numbers of tokens that several numbers of requests have in common, or use step_table(num_requests)."
            )
        parts = nonnegative_least_squares(system, np.ones(len(seconds)))
        alpha, theta = np.split(parts[1:], [len(requests) - 1])
        return AdditiveTable(
            bias_s=float(parts[0]),
            requests=tuple(requests),
            alpha_s=(0.0, *np.cumsum(alpha).tolist()),
            tokens=tuple(tokens),
            theta_s=(0.0, *np.cumsum(theta).tolist()),
        )

    def misfit(self, costs: Costs) -> float:
        """The largest relative error of ``costs`` at the measured points."""
        made = np.array([float(costs.seconds_at(r, [b])[0]) for r, b in self.points])
        return float(np.abs(made / np.asarray(self.seconds) - 1).max())

    def check_matches(self, cfg: LabConfig, device_name: str | None = None) -> None:
        """Raises `LabError` where the profile is of another block size, shape, layout of ranks, engine or device."""
        if self.block_size != cfg.model.drafter.block_size:
            raise LabError(
                f"SPS profile for block_size={self.block_size}, runtime {cfg.model.drafter.block_size}; profile this config: "
                "lab.profile_costs(cfg, ...)."
            )
        now = cfg.to_dict()
        for name, then in self.config.items():
            if name not in FREE and name in now and now[name] != then:
                raise LabError(
                    f"SPS profile was measured with {name}={shown(then)}, and this config has {shown(now[name])}; profile this "
                    "one: lab.profile_costs(cfg, ...)."
                )
        measured_on = self.environment.get("device_name")
        if device_name is not None and measured_on != device_name:
            raise LabError(
                f"SPS profile was measured on {shown(measured_on)}, and this is {device_name!r}; times of one device say nothing "
                "of another: lab.profile_costs(cfg, ...) measures here."
            )

    # -- on disk ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Writes JSON, whole or not at all."""
        return write_table(path, asdict(self), kind=KIND, schema=SCHEMA)


def recorded_costs(name: str) -> SpsProfile:
    """The costs that ship, measured on an H200 (bfloat16 but for ``shipped``, γ 7, captured rounds, 256 positions of context): of
    the trained pair ``shipped``, and of the shapes ``small`` and ``qwen3-30b-a3b``. Raises `LabError` for another name."""
    folder = data_dir() / "benchmarks" / "sps"
    names = sorted(path.stem for path in folder.glob("*.json"))
    if name not in names:
        raise unknown("recorded costs", name, names)
    return load_sps(folder / f"{name}.json")


def load_sps(path: str | Path) -> SpsProfile:
    """The profile in ``path``. Raises `LabError` for a file that is none, and for times that are none."""
    d = read_table(path, kind=KIND, schema=SCHEMA)
    try:
        points = {name: tuple(d.pop(name)) for name in ("requests", "tokens", "seconds")}
        return SpsProfile(**points, **d)
    except LabError as e:
        raise LabError(f"{path}: {e}") from None
    except (KeyError, TypeError) as e:
        raise LabError(f"{path} is no SPS profile: {type(e).__name__}: {e}") from None
