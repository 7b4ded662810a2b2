"""The experts in plain torch: every expert computes every row in float32, the wanted ones are picked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def experts(
    x: Tensor,
    local_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """SwiGLU experts, weighted and summed over k.

    Args:
        x: [T, H].
        local_ids: [T, k] int64 index into the E experts; anything outside 0 … E − 1 is not computed.
        topk_weights: [T, k] float32.
        gate_up: [E, 2I, H], gate above up.
        down: [E, H, I].
        residual: [T, H], added in float32 before the one rounding to the dtype of ``x``.

    Returns:
        [T, H] in the dtype of ``x``. Products accumulate in float32; the activation is rounded to the dtype of ``x``,
        the weighted sum over k is in float32. A row with no expert gives exactly 0 (or ``residual``), whatever it holds.
    """
    num_experts = gate_up.shape[0]
    kept = (local_ids >= 0) & (local_ids < num_experts)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for j in range(local_ids.shape[1]):
        for expert in range(num_experts):
            gate, up = (x.float() @ gate_up[expert].float().T).chunk(2, dim=-1)
            act = (F.silu(gate) * up).to(x.dtype)
            y = (act.float() @ down[expert].float().T) * topk_weights[:, j, None].float()
            # Selected, not multiplied: 0 · NaN is NaN, and dropped rows may hold anything.
            out = torch.where((kept[:, j] & (local_ids[:, j] == expert))[:, None], out + y, out)
    if residual is not None:
        out = out + residual.float()
    return out.to(x.dtype)
