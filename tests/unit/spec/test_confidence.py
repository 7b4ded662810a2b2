"""STS on tensors is STS on numbers, and leaves certainty certain."""

from __future__ import annotations

import numpy as np
import torch

from dspark_lab.plan.calibration import ConfidenceRounds, StsEntry, StsTable
from dspark_lab.spec.confidence import calibrated


def test_as_the_table_does() -> None:
    table = StsTable(block_size=3, entries={1.0: StsEntry(scales=(0.5, 1.0, 3.0), num_rounds=1, digest="")})
    rounds = ConfidenceRounds(
        logits=np.random.default_rng(0).normal(0, 3, (50, 3)), accepted=np.zeros(50), temperature=1.0
    )
    head = torch.tensor(rounds.confidence, dtype=torch.float32)
    made = calibrated(head, torch.tensor(table.scales(1.0, block_size=3)))
    assert made.dtype == torch.float32
    assert np.abs(made.numpy() - table.confidence(rounds)).max() < 1e-6
    assert calibrated(torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([2.0, 2.0, 2.0])).tolist() == [[0.0, 0.5, 1.0]]
