"""STS: a temperature for each position of a block, so that confidences multiply to the share of prefixes really accepted.

c_k = σ(logit_k / T_k). For k = 1..γ in turn, T_k is what minimises the calibration error of Π_{i≤k} c_i against "the first k
drafts were accepted", over a grid, with the positions before as they are (arXiv 2607.05147). N rounds, γ drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError
from dspark_lab.plan.reliability import NUM_BINS, ece
from dspark_lab.plan.table_files import read_table, write_table

KIND, SCHEMA = "sts_table", 1
GRID = np.exp(np.linspace(-np.log(8.0), np.log(8.0), 121))
"""Temperatures tried at each position: 1/8 to 8, evenly in their logarithm, 1 among them."""


def greedy_accepted(draft_tokens: np.ndarray, target_tokens: np.ndarray) -> np.ndarray:
    """[N] drafts accepted by greedy verification: the prefix of ``draft_tokens`` [N, γ] that equals the target's argmax
    ``target_tokens`` [N, γ or γ+1]. The label at temperature 0; above, it is what chain sampling accepted."""
    drafts = np.asarray(draft_tokens)
    matches = drafts == np.asarray(target_tokens)[:, : drafts.shape[1]]
    return np.cumprod(matches, axis=1).sum(axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfidenceRounds:
    """What a fit or a report reads: confidences before the sigmoid, and how much of each whole block was accepted."""

    logits: np.ndarray
    """[N, γ]."""
    accepted: np.ndarray
    """[N] 0..γ: the label. By greedy verification at temperature 0, by chain sampling above."""
    temperature: float
    """Of sampling, on both sides."""
    verified: np.ndarray | None = None
    """[N] drafts verified; None: whole blocks."""
    applied: tuple[float, ...] | None = None
    """STS temperatures that were in use when these rounds ran; None: none."""

    def __post_init__(self) -> None:
        logits, accepted = _numbers("logits", self.logits), _numbers("accepted", self.accepted)
        if logits.ndim != 2 or accepted.shape != logits.shape[:1]:
            raise LabError(
                f"logits have the shape {logits.shape} and accepted {accepted.shape}; they are [rounds, drafts] and [rounds]."
            )
        if not np.isfinite(logits).all():
            raise LabError(
                "confidence logits hold NaN or infinity; the drafter's confidence head gave none that can be used."
            )
        if len(accepted) and not 0 <= accepted.min() <= accepted.max() <= logits.shape[1]:
            raise LabError(
                f"accepted goes from {accepted.min():g} to {accepted.max():g}; a block has {logits.shape[1]} drafts."
            )
        if (accepted != np.floor(accepted)).any():
            raise LabError(
                "accepted holds a number that is not whole, and counts drafts; give acceptance lengths minus 1."
            )
        if self.verified is not None and np.shape(self.verified) != accepted.shape:
            raise LabError(
                f"verified has the shape {np.shape(self.verified)} and accepted {accepted.shape}; one a round."
            )
        _check_temperature(self.temperature)
        object.__setattr__(self, "logits", logits)
        object.__setattr__(self, "accepted", accepted.astype(np.int64))

    @classmethod
    def of_confidence(cls, confidence: np.ndarray, accepted: np.ndarray, **rest: Any) -> ConfidenceRounds:
        """From ``confidence`` [N, γ] after the sigmoid; 0 and 1 become the nearest float32 that are neither."""
        c = _numbers("confidence", confidence).clip(2.0**-24, 1 - 2.0**-24)
        return cls(logits=np.log(c) - np.log1p(-c), accepted=accepted, **rest)

    @property
    def block_size(self) -> int:
        return self.logits.shape[1]

    @property
    def confidence(self) -> np.ndarray:
        """[N, γ] c_k as the head gave them, without STS."""
        return _sigmoid(self.logits)

    @property
    def happened(self) -> np.ndarray:
        """[N, γ] bool: the first k drafts were accepted."""
        return self.accepted[:, None] > np.arange(self.block_size)

    @property
    def digest(self) -> str:
        """Tells whether two collections are the same rounds."""
        return hashlib.sha256(self.logits.tobytes() + self.accepted.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class StsEntry:
    """The temperatures of one sampling temperature, and what they were fitted on."""

    scales: tuple[float, ...]
    """T_1..T_γ."""
    num_rounds: int
    digest: str
    """Of the rounds of the fit, so that a report on the same rounds can be refused."""


@dataclass(frozen=True, kw_only=True)
class StsTable:
    """Fitted temperatures by position, for each temperature of sampling: acceptance is another event at each."""

    block_size: int
    entries: dict[float, StsEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_int(self.block_size) or self.block_size < 1:
            raise LabError(f"block_size={shown(self.block_size)} is not a whole number of at least 1.")
        for temperature, entry in self.entries.items():
            _check_temperature(temperature)
            if len(entry.scales) != self.block_size:
                raise LabError(
                    f"STS table at temperature {temperature} has {len(entry.scales)} positions, block_size={self.block_size}."
                )
            for scale in entry.scales:
                if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < float("inf"):
                    raise LabError(
                        f"STS table holds {shown(scale)}; a temperature is a finite number above 0: fit it again."
                    )

    def scales(self, temperature: float, *, block_size: int) -> np.ndarray:
        """[γ] T_k for rounds at ``temperature``. Raises `LabError` for another γ than the fit's, and an unfitted temperature."""
        if block_size != self.block_size:
            raise LabError(
                f"STS table fit for {self.block_size}, runtime {block_size}; its temperatures belong to positions, so fit one "
                f"with block_size={block_size}."
            )
        if temperature not in self.entries:
            raise LabError(
                f"STS table has no temperatures for sampling at temperature={shown(temperature)}; it was fitted at "
                f"{sorted(self.entries)}. Acceptance is another event at each: collect rounds there and fit them too."
            )
        return np.array(self.entries[temperature].scales)

    def confidence(self, rounds: ConfidenceRounds) -> np.ndarray:
        """[N, γ] calibrated c_k of ``rounds``."""
        return _sigmoid(rounds.logits / self.scales(rounds.temperature, block_size=rounds.block_size))

    def save(self, path: str | Path) -> Path:
        """Writes JSON, whole or not at all."""
        entries = [{"temperature": t, **asdict(e)} for t, e in sorted(self.entries.items())]
        return write_table(path, {"block_size": self.block_size, "entries": entries}, kind=KIND, schema=SCHEMA)


def load_sts(path: str | Path) -> StsTable:
    """The table in ``path``. Raises `LabError` for a file that is none, and for temperatures that are none."""
    d = read_table(path, kind=KIND, schema=SCHEMA)
    try:
        entries = {e["temperature"]: _entry(e) for e in d["entries"]}
        return StsTable(block_size=d["block_size"], entries=entries)
    except LabError as e:
        raise LabError(f"{path}: {e}") from None
    except (KeyError, TypeError, AttributeError) as e:
        raise LabError(f"{path} is no STS table: {type(e).__name__}: {e}") from None


def fit_sts(
    rounds: ConfidenceRounds | Sequence[ConfidenceRounds],
    *,
    grid: np.ndarray = GRID,
    num_bins: int = NUM_BINS,
) -> StsTable:
    """The table of ``rounds``: one collection, or one for each temperature of sampling.

    Raises `LabError` for rounds that were scheduled or thresholded (what was not verified cannot be labelled), that ran with
    another table than the identity, of unlike block sizes, and for two collections at one temperature.
    """
    if isinstance(rounds, ConfidenceRounds):
        rounds = [rounds]
    if not isinstance(rounds, Sequence) or not all(isinstance(r, ConfidenceRounds) for r in rounds):
        raise LabError(
            f"rounds={shown(rounds)} is neither lab.ConfidenceRounds nor a list of them; Evaluation.confidence_rounds() gives some."
        )
    several, grid = list(rounds), _numbers("grid", grid)
    if grid.ndim != 1 or not len(grid) or not (np.isfinite(grid) & (grid > 0)).all():
        raise LabError(f"grid={shown(grid)} is not a list of finite temperatures above 0.")
    if not several:
        raise LabError("there are no rounds to fit STS on; collect some with verify='static'.")
    entries: dict[float, StsEntry] = {}
    for r in several:
        _check_collection(r, several[0].block_size)
        if r.temperature in entries:
            raise LabError(f"two collections are at temperature={r.temperature}; put their rounds together.")
        scales = tuple(float(s) for s in _fit_positions(r, grid, num_bins))
        entries[r.temperature] = StsEntry(scales=scales, num_rounds=len(r.accepted), digest=r.digest)
    return StsTable(block_size=several[0].block_size, entries=entries)


def _fit_positions(rounds: ConfidenceRounds, grid: np.ndarray, num_bins: int) -> np.ndarray:
    """[γ]; of equally good temperatures the one nearest to 1."""
    by_nearness = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    prefix, scales = np.ones(len(rounds.accepted)), np.ones(rounds.block_size)
    for k in range(rounds.block_size):
        happened = rounds.happened[:, k]
        errors = [ece(prefix * _sigmoid(rounds.logits[:, k] / t), happened, num_bins) for t in by_nearness]
        scales[k] = by_nearness[int(np.argmin(errors))]
        prefix = prefix * _sigmoid(rounds.logits[:, k] / scales[k])
    return scales


def _check_collection(rounds: ConfidenceRounds, block_size: int) -> None:
    if rounds.block_size != block_size:
        raise LabError(
            f"STS rounds of block_size={rounds.block_size} beside {block_size}; a table is of one block size."
        )
    if not len(rounds.accepted):
        raise LabError(f"the collection at temperature={rounds.temperature} has no rounds.")
    if rounds.applied is not None and any(t != 1.0 for t in rounds.applied):
        raise LabError(
            f"STS rounds were collected with a non-identity table (temperatures {list(rounds.applied)}); its effect would be "
            "fitted away a second time: collect without one."
        )
    if rounds.verified is not None and (short := int((np.asarray(rounds.verified) < block_size).sum())):
        raise LabError(
            f"{short} of {len(rounds.accepted)} STS rounds verified fewer than {block_size} drafts; what was cut has no label: "
            "collect with verify='static'."
        )


def _check_temperature(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise LabError(f"temperature={shown(value)} is not a finite number of at least 0; 0 is greedy.")


def _entry(e: Mapping[str, Any]) -> StsEntry:
    return StsEntry(scales=tuple(e["scales"]), num_rounds=e["num_rounds"], digest=e["digest"])


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise LabError(f"{name}={shown(values)} is no array of numbers.") from None


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
