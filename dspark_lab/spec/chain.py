"""Chain rejection sampling of a drafted block: what is committed has exactly the target's distribution.

B requests, γ drafts, V vocabulary. Y. Leviathan et al., ICML 2023, applied to a chain as DSpark does (arXiv 2607.05147).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_kernels.accept import Accepted
from dspark_lab.spec.sampling import draw

FLOOR = 1e-8
"""Least p_d that a ratio divides by, and least residual mass that is drawn from, as in DeepSpec."""


def chain_accept(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    lengths: Tensor,
    *,
    accept_noise: Tensor,
    bonus_noise: Tensor,
) -> Accepted:
    """``draft_tokens`` [B, γ] drawn from ``draft_probs`` [B, γ, V], against ``target_probs`` [B, γ+1, V] of the same tokens.

    Draft k is kept while u < p_t(x_k) / p_d(x_k). At the first that is not, the bonus is drawn from the positive part of
    p_t − p_d; where all of the first ``lengths`` [B] int64 drafts pass, from p_t behind the last of them, also where a block
    was cut short. ``accept_noise`` [B, γ] and ``bonus_noise`` [B, γ+1]: uniforms, one a position (`spec.noise.uniforms`).

    Exact only where ``lengths`` say nothing of the drafts that they let in: see `plan.schedule`. Rows of probabilities that are
    one-hot (greedy) give the longest matching prefix and the target's argmax.
    """
    gamma = draft_tokens.shape[1]
    drafted = draft_tokens[..., None]
    p_d = draft_probs.gather(-1, drafted).squeeze(-1).to(torch.float64)
    p_t = target_probs[:, :gamma].gather(-1, drafted).squeeze(-1).to(torch.float64)
    within = torch.arange(gamma, device=draft_tokens.device) < lengths[:, None]
    passed = (accept_noise < p_t / p_d.clamp(min=FLOOR)) & within
    num_accepted = passed.to(torch.int64).cumprod(dim=1).sum(dim=1)
    bonus = draw(
        _bonus_weights(draft_probs, target_probs, num_accepted, num_accepted < lengths),
        bonus_noise.gather(1, num_accepted[:, None]).squeeze(1),
    )
    column = torch.arange(gamma + 1, device=draft_tokens.device)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    out_tokens = torch.where(column == num_accepted[:, None], bonus[:, None], padded)
    return Accepted(num_accepted, bonus, out_tokens)


def _bonus_weights(draft_probs: Tensor, target_probs: Tensor, at: Tensor, rejected: Tensor) -> Tensor:
    """[B, V]: the residual at position ``at`` [B] where a draft was ``rejected`` there, else the target's distribution."""
    batch = torch.arange(len(at), device=at.device)
    target = target_probs[batch, at].to(torch.float64)
    if not draft_probs.shape[1]:
        return target
    drafted = draft_probs[batch, at.clamp(max=draft_probs.shape[1] - 1)].to(torch.float64)
    residual = (target - drafted).clamp(min=0)
    usable = rejected & (residual.sum(dim=-1) > FLOOR)
    return torch.where(usable[:, None], residual, target)
