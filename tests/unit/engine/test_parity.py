"""The whole loop against checkpoints and outputs that DeepSpec wrote: tokens and both lengths, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_lab.engine.generate import generate
from dspark_lab.models.checkpoint import load_pair

PARITY = Path(__file__).parents[2] / "data" / "parity"


@pytest.mark.parametrize("folder", sorted(p.name for p in PARITY.iterdir()))
@pytest.mark.parametrize("batch_size", [1, 3])
def test_tokens_and_lengths_are_exact(folder: str, batch_size: int) -> None:
    spec = json.loads((PARITY / folder / "cases.json").read_text())
    threshold, new = spec["confidence_threshold"], spec["max_new_tokens"]
    cfg = load_pair(
        PARITY / folder / "target",
        PARITY / folder / "drafter",
        device="cpu",
        batch_size=batch_size,
        verify="threshold" if threshold > 0 else "static",
        confidence_threshold=threshold,
        max_new_tokens=new,
    )
    out = generate(cfg, [case["prompt"] for case in spec["cases"]], max_new_tokens=new)
    for got, case in zip(out, spec["cases"], strict=True):
        assert got.tokens == case["output"]
        assert got.acceptance_lengths == case["acceptance_lengths"]
        assert got.proposal_lengths == case["proposal_lengths"]
