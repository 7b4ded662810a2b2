"""`BudgetRelay`: the host's half of scheduled verification. Confidences come back with a round's results, budgets go out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_lab.config import LabConfig
from dspark_lab.engine.request import Request
from dspark_lab.errors import LabError
from dspark_lab.plan.calibration import load_sts
from dspark_lab.plan.costs import Costs
from dspark_lab.plan.scheduler import LAG, Scheduler
from dspark_lab.plan.sps import load_sps


def step_costs(cfg: LabConfig, device_name: str) -> Costs | None:
    """What ``sps_path`` holds, made sure to be of this config and device; None without a path."""
    if cfg.engine.sps_path is None:
        return None
    profile = load_sps(Path(cfg.engine.sps_path))
    profile.check_matches(cfg, device_name)
    several = len(set(profile.requests)) > 1
    return profile.additive() if several else profile.step_table()


def sts_scales(cfg: LabConfig) -> list[float] | None:
    """[γ] temperatures of ``sts_path`` for this config's temperature of sampling; None without a path."""
    if cfg.engine.sts_path is None:
        return None
    table = load_sts(Path(cfg.engine.sts_path))
    return table.scales(cfg.engine.temperature, block_size=cfg.model.drafter.block_size).tolist()


class BudgetRelay:
    """Gives each round its budget from the confidences of `LAG` rounds before, which have reached the host by then."""

    lag = LAG

    def __init__(self, cfg: LabConfig, device_name: str) -> None:
        """Warns where no costs were measured, or where they leave nothing to trim."""
        try:
            costs = step_costs(cfg, device_name)
        except OSError as e:
            raise LabError(f"sps_path={cfg.engine.sps_path!r} cannot be read: {e.strerror or e}.") from None
        self.scheduler = Scheduler(costs, block_size=cfg.gamma, max_requests=cfg.engine.batch_size, lag=LAG)

    def budget(self, round_index: int, active: Sequence[Request]) -> int | None:
        """Drafts to verify in round ``round_index`` of all ``active`` requests together; None verifies whole blocks."""
        return self.scheduler.budget(round_index, _names(active)) if active else None

    def publish(self, round_index: int, rows: Sequence[Request], confidence: np.ndarray) -> None:
        """Confidences [rows, γ] of a round whose results have arrived."""
        self.scheduler.publish(round_index, _names(rows), confidence)

    def clear(self) -> None:
        """Forgets all rounds."""
        self.scheduler.clear()


def _names(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """A slot that another request took over is another row."""
    return [(r.slot, r.number) for r in requests]
