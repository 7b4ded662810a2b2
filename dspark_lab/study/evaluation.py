"""`Evaluation`: what `evaluate` found, a row a prompt; its tables, saved and read again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.acceptance import LOOP_SHARE, accept_length, by_position
from dspark_lab.errors import LabError
from dspark_lab.plan.calibration import ConfidenceRounds
from dspark_lab.plan.table_files import read_table, write_table

FILE_KIND, SCHEMA = "evaluation", 1
KEYS = ("drafter", "kind", "temperature", "block_size", "threshold")
ROW_COLUMNS = (*KEYS, "prompt", "num_rounds", "num_tokens", "accepted", "num_verified", "seconds", "num_steps", "loop_share",
               "ended", "tokens", "lengths", "confidence")  # fmt: skip
TABLE_COLUMNS = (*KEYS, "num_prompts", "num_rounds", "accept_length", "low", "high", "accept_length_plain", "plain_low",
                 "plain_high", "num_looping", "loop_share", "verified_a_round", "acceptance_rate", "round_ms", "tokens_per_s",
                 "label")  # fmt: skip
POSITION_COLUMNS = (*KEYS, "position", "accepted_share", "low", "high", "num_prompts", "label")


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Prompts measured in every combination of drafter, kind of text, temperature, γ and threshold."""

    rows: pd.DataFrame
    """A row a prompt and combination: ``accepted`` counts rounds by accepted drafts (0..γ), ``tokens`` are those generated."""
    device_name: str
    max_new_tokens: int
    batch_size: int
    complete: bool = True
    """False: it was stopped before its end."""
    source: str = "measured"

    @property
    def label(self) -> str:
        """Source and device, for tables and figures."""
        parts = [
            self.source,
            self.device_name,
            f"batch {self.batch_size}",
            f"{self.max_new_tokens} new tokens a prompt",
        ]
        return " · ".join([*parts, "intervals over prompts", *["stopped early"] * (not self.complete)])

    def table(self) -> pd.DataFrame:
        """A row a combination. ``accept_length``: tokens a round, bonus included, with its 95 % bootstrap interval over prompts
        (``low``, ``high``); ``accept_length_plain``: without the prompts whose text goes round in loops (``num_looping`` of
        them). ``acceptance_rate``: committed tokens over verified rows, anchor and bonus counted. ``round_ms`` and
        ``tokens_per_s``: of this loop as it ran, prefill within; no benchmark.
        """
        return pd.DataFrame(
            [{**keys, **self._figures(rows)} for keys, rows in self._cells()], columns=list(TABLE_COLUMNS)
        )

    def positions(self, *, loops: bool = True) -> pd.DataFrame:
        """A row a combination and position k: P_k, rounds that accepted draft k over all rounds, with its 95 % bootstrap
        interval over prompts. ``loops=False`` leaves looping prompts out."""
        found = []
        for keys, rows in self._cells():
            kept = rows if loops else rows[rows["loop_share"] < LOOP_SHARE]
            for k, share in enumerate(by_position(kept), start=1):
                values = {"position": k, "accepted_share": share.mean, "low": share.low, "high": share.high}
                found.append({**keys, **values, "num_prompts": len(kept), "label": self.label})
        return pd.DataFrame(found, columns=list(POSITION_COLUMNS))

    def confidence_rounds(self, drafter: str | None = None, *, temperature: float | None = None, prompts: slice = slice(None)) -> ConfidenceRounds:  # fmt: skip
        """Whole blocks with their confidences, of all kinds of text together, for `lab.fit_sts`, `lab.calibration`, `lab.reliability`.

        ``prompts``: which of each kind, so that a fit and a report read different ones: ``slice(0, 32)``, ``slice(32, None)``.
        Raises `LabError` where no rounds with confidence were kept, and where drafter or temperature have to be said.
        """
        rows = self.rows[(self.rows["threshold"] == 0) & self.rows["confidence"].notna()]
        for name, wanted in (("drafter", drafter), ("temperature", temperature)):
            there = sorted(rows[name].unique().tolist())
            if wanted is None and len(there) > 1:
                raise LabError(f"rounds of {name} {there} are here, and a calibration is of one; give {name}.")
            rows = rows if wanted is None else rows[rows[name] == wanted]
        rows = rows[rows["block_size"] == rows["block_size"].max()]
        numbers = sorted(rows["prompt"].unique())[prompts]
        rows = rows[rows["prompt"].isin(numbers)]
        if not len(rows):
            raise LabError(
                "no rounds with confidence are here: evaluate a drafter with a confidence head, with keep_rounds=True and a "
                "threshold of 0."
            )
        confidence = np.concatenate([np.asarray(c, dtype=float) for c in rows["confidence"]])
        accepted = np.concatenate([np.asarray(lengths) - 1 for lengths in rows["lengths"]])
        return ConfidenceRounds.of_confidence(confidence, accepted, temperature=float(rows["temperature"].iloc[0]))

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Writes JSON, whole or not at all."""
        rows = json.loads(self.rows.to_json(orient="records", double_precision=15))
        values = {"device_name": self.device_name, "max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        return write_table(path, {**values, "complete": self.complete, "rows": rows}, kind=FILE_KIND, schema=SCHEMA)

    # -- of one combination ----------------------------------------------------------------------------------------

    def _cells(self) -> list[tuple[dict[str, Any], pd.DataFrame]]:
        groups = self.rows.groupby(list(KEYS), sort=False)
        return [(dict(zip(KEYS, key, strict=True)), rows) for key, rows in groups]  # pyright: ignore[reportArgumentType]

    def _figures(self, rows: pd.DataFrame) -> dict[str, Any]:
        plain = rows[rows["loop_share"] < LOOP_SHARE]
        whole, alone = accept_length(rows), accept_length(plain)
        seconds, rounds = float(rows["seconds"].sum()), int(rows["num_rounds"].sum())
        return {
            "num_prompts": len(rows),
            "num_rounds": rounds,
            "accept_length": whole.mean,
            "low": whole.low,
            "high": whole.high,
            "accept_length_plain": alone.mean,
            "plain_low": alone.low,
            "plain_high": alone.high,
            "num_looping": len(rows) - len(plain),
            "loop_share": float(rows["loop_share"].mean()),
            "verified_a_round": rows["num_verified"].sum() / rounds,
            "acceptance_rate": rows["num_tokens"].sum() / (rows["num_verified"].sum() + rounds),
            "round_ms": self._round_ms(rows),
            "tokens_per_s": rows["num_tokens"].sum() / seconds,
            "label": self.label,
        }

    def _round_ms(self, rows: pd.DataFrame) -> float:
        """Time over steps of the batch: a step runs a round of each of its requests."""
        steps = rows.groupby(rows["prompt"] // self.batch_size)["num_steps"].first().sum()
        return 1e3 * float(rows["seconds"].sum()) / float(steps)


def load_evaluation(path: str | Path) -> Evaluation:
    """What `Evaluation.save` wrote; shown as ``recorded``. Raises `LabError` for a file that is none."""
    d = read_table(path, kind=FILE_KIND, schema=SCHEMA)
    try:
        rows = pd.DataFrame(d["rows"], columns=list(ROW_COLUMNS))
        rows["confidence"] = rows["confidence"].astype(object).where(rows["confidence"].notna(), None)
        about = {k: d[k] for k in ("device_name", "max_new_tokens", "batch_size", "complete")}
    except (KeyError, TypeError, ValueError) as e:
        raise LabError(f"{path} is no evaluation: {type(e).__name__}: {e}") from None
    return Evaluation(rows=rows, source="recorded", **about)
