"""Confidences on the device with STS applied: the twin of `plan.calibration.StsTable.confidence` on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def calibrated(confidence: Tensor, scales: Tensor) -> Tensor:
    """c_k = σ(logit_k / T_k): ``confidence`` [B, γ] within 0 to 1 as the head gives it, ``scales`` [γ] of an `StsTable`.

    The logit is taken back in float64, in which a confidence that float32 tells from 1 keeps its distance.
    """
    return torch.special.logit(confidence.double()).div(scales.double()).sigmoid().to(confidence.dtype)
