"""How a request samples, alike in drafter and target: temperature, then top-k, then top-p. The ops are in `dspark_kernels.sampling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_kernels.sampling.reference import SamplingRows
from dspark_lab.config.choices import MIN_TEMPERATURE
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError

KEEP_ALL = 2**62


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request samples."""

    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Keeps the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keeps the fewest of the likeliest tokens whose mass reaches p."""

    def __post_init__(self) -> None:
        t, p = self.temperature, self.top_p
        if not _is_number(t) or not (t == 0 or MIN_TEMPERATURE <= t < math.inf):
            raise LabError(
                f"temperature={shown(t)} is neither 0 (greedy) nor a finite number of at least {MIN_TEMPERATURE}."
            )
        if not is_int(self.top_k) or self.top_k < 0:
            raise LabError(f"top_k={shown(self.top_k)} is not a whole number of at least 0; 0 keeps every token.")
        if not _is_number(p) or not 0 < p <= 1:
            raise LabError(f"top_p={shown(p)} is not above 0 and at most 1; 1 keeps every token.")

    @property
    def is_greedy(self) -> bool:
        """At temperature 0, and wherever one token is kept."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def kept(self) -> int:
        """How many of the likeliest tokens stay, as an int64 that is over every vocabulary where all do."""
        return min(self.top_k or KEEP_ALL, KEEP_ALL)

    @property
    def label(self) -> str:
        """What figures may call it: never sampling where one token is kept, whatever the temperature says."""
        if self.is_greedy:
            return "greedy" if self.temperature == 0 else f"greedy (top_k=1 at temperature {self.temperature:g})"
        cuts = [f"top_k={self.top_k}"] * (self.top_k > 0) + [f"top_p={self.top_p:g}"] * (self.top_p < 1)
        return ", ".join([f"sampling at temperature {self.temperature:g}", *cuts])


def sampling_rows(requests: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingRows:
    """The settings of ``requests`` on ``device``, as the ops take them."""
    return SamplingRows(
        temperature=torch.tensor([s.temperature for s in requests], dtype=torch.float32, device=device),
        top_k=torch.tensor([s.kept for s in requests], dtype=torch.int64, device=device),
        top_p=torch.tensor([s.top_p for s in requests], dtype=torch.float32, device=device),
        is_greedy=torch.tensor([s.is_greedy for s in requests], dtype=torch.bool, device=device),
        all_greedy=all(s.is_greedy for s in requests),
        cuts=any(not s.is_greedy and (s.top_k > 0 or s.top_p < 1) for s in requests),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
