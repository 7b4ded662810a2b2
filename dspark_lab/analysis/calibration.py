"""Confidence before and after STS as tables: by position, and as the bins of reliability diagrams. Draws nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.plan.calibration import ConfidenceRounds, StsTable
from dspark_lab.plan.reliability import NUM_BINS, auc, binned, brier, ece

COLUMNS = ("position", "temperature", "num_rounds", "accepted_share", "ece_raw", "ece", "brier_raw", "brier", "auc_raw",
           "auc")  # fmt: skip
BIN_COLUMNS = ("stage", "position", "low", "high", "num_rounds", "confidence", "accepted_share", "accepted_low",
               "accepted_high")  # fmt: skip
Z95 = 1.959964


def calibration(rounds: ConfidenceRounds, table: StsTable, *, num_bins: int = NUM_BINS) -> pd.DataFrame:
    """A row a position k: expected calibration error, Brier score and AUC of Π_{i≤k} c_i, raw and with ``table``.

    ``rounds`` are a third split: neither what the drafter was trained on nor what the table was fitted on, which is refused.
    """
    _check_table(table)
    stages, happened = _prefixes(rounds, table), rounds.happened
    rows = []
    for k in range(rounds.block_size):
        y, raw, sts = happened[:, k], stages["raw"][:, k], stages["sts"][:, k]
        rows.append(
            {
                "position": k + 1,
                "temperature": rounds.temperature,
                "num_rounds": len(y),
                "accepted_share": float(y.mean()) if len(y) else float("nan"),
                "ece_raw": ece(raw, y, num_bins),
                "ece": ece(sts, y, num_bins),
                "brier_raw": brier(raw, y),
                "brier": brier(sts, y),
                "auc_raw": auc(raw, y),
                "auc": auc(sts, y),
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def reliability(rounds: ConfidenceRounds, table: StsTable | None = None, *, num_bins: int = NUM_BINS) -> pd.DataFrame:
    """A row a stage (``raw``, and ``sts`` with a table), position and bin that holds rounds: what was promised, what came.

    ``confidence``: mean of Π_{i≤k} c_i in the bin ``low`` to ``high``; ``accepted_share`` with its 95 % Wilson interval.
    """
    rows: list[dict[str, Any]] = []
    for stage, prefixes in _prefixes(rounds, table).items():
        for k in range(rounds.block_size):
            bins = binned(prefixes[:, k], rounds.happened[:, k], num_bins)
            for b in np.flatnonzero(bins.count):
                n, share = int(bins.count[b]), float(bins.happened[b] / bins.count[b])
                low, high = _wilson(share, n)
                rows.append(
                    {
                        "stage": stage,
                        "position": k + 1,
                        "low": b / num_bins,
                        "high": (b + 1) / num_bins,
                        "num_rounds": n,
                        "confidence": float(bins.probability[b] / n),
                        "accepted_share": share,
                        "accepted_low": low,
                        "accepted_high": high,
                    }
                )
    return pd.DataFrame(rows, columns=list(BIN_COLUMNS))


def _prefixes(rounds: ConfidenceRounds, table: StsTable | None) -> dict[str, np.ndarray]:
    """[N, γ] Π_{i≤k} c_i by stage. Refuses the rounds of the table's own fit."""
    if not isinstance(rounds, ConfidenceRounds):
        raise LabError(f"rounds={shown(rounds)} is no lab.ConfidenceRounds; Evaluation.confidence_rounds() gives some.")
    if table is not None:
        _check_table(table)
    stages = {"raw": np.cumprod(rounds.confidence, axis=1)}
    if table is not None:
        confidence = table.confidence(rounds)
        if table.entries[rounds.temperature].digest == rounds.digest:
            raise LabError(
                "these are the very rounds that the STS table was fitted on, and would flatter it; report on a third split, of "
                "other text."
            )
        stages["sts"] = np.cumprod(confidence, axis=1)
    return stages


def _wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of ``n``; E. B. Wilson, 1927."""
    z2 = Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * float(np.sqrt(share * (1 - share) / n + z2 / (4 * n * n)))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _check_table(table: object) -> None:
    if not isinstance(table, StsTable):
        raise LabError(f"table={shown(table)} is no STS table; lab.fit_sts(rounds) or lab.load_sts(path) gives one.")
