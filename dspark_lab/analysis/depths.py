"""`depth_table`: what drafters of several depths accept, from the notes of ``data/models/make.py depth``; intervals over texts, seeds beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.acceptance import NUM_RESAMPLES
from dspark_lab.config.kinds import shown
from dspark_lab.config.shipped import DRAFTERS, data_dir
from dspark_lab.errors import LabError

MEAN = "mean"
"""The kind that stands for the mean over all kinds of text."""


def depth_table(report: Mapping[str, Any] | str | Path | None = None) -> pd.DataFrame:
    """A row a drafter, depth and kind of text, the mean over kinds behind them: what is accepted, in tokens a round, bonus included.

    ``report``: the notes by name, or a JSON file of them, under the key ``depth`` or alone; None: what ships. Over several seeds
    ``accept_length`` is the mean of ``by_seed``; ``low`` and ``high`` are 95 % over texts, which all drafters share, so that two
    of them differ more surely than their intervals look. Raises `LabError` where nothing was trained at several depths.
    """
    notes = [note for name, note in _notes(report).items() if "@depth" in name]
    if not notes:
        raise LabError("this report has no depths; data/models/make.py depth measures them.")
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for note in notes:
        if lost := [k for k in ("num_layers", "recipe", "device", "trained_parameters") if k not in note]:
            raise LabError(f"a note of {note['drafter']!r} has no {lost[0]}; data/models/make.py depth writes it.")
        found.setdefault((note["drafter"], note["num_layers"]), []).append(note)
    known = {name: at for at, name in enumerate(DRAFTERS)}
    order = sorted(found, key=lambda key: (known.get(key[0], len(known)), key))
    try:
        return pd.DataFrame([row for key in order for row in _rows(*key, found[key])])
    except (KeyError, TypeError, ValueError) as e:
        raise LabError(
            f"a note of this report is not as data/models/make.py depth writes it: {type(e).__name__}: {e}."
        ) from None


def _notes(report: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if report is None or isinstance(report, str | Path):
        path = data_dir() / "models" / "report.json" if report is None else Path(report)
        if not path.is_file():
            raise LabError(f"{path} is no file; give the report.json that data/models/make.py depth wrote.")
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise LabError(
                f"{path} is no JSON: {e}; give the report.json that data/models/make.py depth wrote."
            ) from None
    notes = report.get("depth", report) if isinstance(report, Mapping) else None
    if not isinstance(notes, Mapping):
        raise LabError(f"report={shown(report)} is no notes by name; give what data/models/make.py depth wrote.")
    return {
        name: {**note} | {"drafter": name.partition("@")[0]}
        for name, note in notes.items()
        if isinstance(note, Mapping) and "text" in note
    }


def _rows(drafter: str, num_layers: int, notes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One depth of a drafter: the kinds of text, then their mean."""
    kinds = list(notes[0]["text"])
    seeds = np.array([[note["text"][kind]["accept_length"] for kind in kinds] for note in notes])
    draws = np.array([_resampled([note["text"][kind]["by_text"] for note in notes]) for kind in kinds])
    recipe = notes[0]["recipe"]
    common = {
        "num_layers": num_layers, "num_seeds": len(notes), "trained_parameters": notes[0]["trained_parameters"],
        "num_steps": recipe["num_steps"], "peak_lr": recipe["peak_lr"],
        "label": f"recorded · {notes[0]['device']} · temperature 1, {recipe['num_steps']:,} steps",
    }  # fmt: skip
    columns = [*zip(kinds, seeds.T, draws, strict=True), (MEAN, seeds.mean(axis=1), draws.mean(axis=0))]
    return [{"drafter": drafter, "kind": kind, **_interval(values, drawn), **common} for kind, values, drawn in columns]


def _interval(by_seed: np.ndarray, drawn: np.ndarray) -> dict[str, Any]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {
        "accept_length": float(by_seed.mean()), "low": float(low), "high": float(high), "by_seed": by_seed.tolist(),
    }  # fmt: skip


def _resampled(by_text: Sequence[Sequence[float]]) -> np.ndarray:
    """[NUM_RESAMPLES]: mean over seeds of the accept length of texts drawn again, the same texts for every drafter and seed.

    Texts are of one length, so that rounds go as 1 / accept length and tokens over rounds is the harmonic mean.
    """
    rounds = 1 / np.asarray(by_text, dtype=float)
    at = np.random.default_rng(0).integers(0, rounds.shape[1], (NUM_RESAMPLES, rounds.shape[1]))
    return (1 / rounds[:, at].mean(axis=-1)).mean(axis=0)
