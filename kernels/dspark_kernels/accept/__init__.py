"""Which drafts the target keeps, at temperature 0, and the argmax over the vocabulary that it rests on."""

from __future__ import annotations

from torch import Tensor

from dspark_kernels.accept import reference
from dspark_kernels.accept.reference import Accepted
from dspark_kernels.backend import on_triton


def argmax_rows(x: Tensor) -> Tensor:
    """``x`` [N, V] to [N] int64, the index of each row's largest value; the lowest index among equals, as in torch.argmax.

    Unlike there, NaN never wins on the Triton path: a row of NaN gives 0. Triton on CUDA and in its interpreter, plain
    torch elsewhere.
    """
    if on_triton(x):
        from dspark_kernels.accept import kernel

        return kernel.argmax_rows(x)
    return reference.argmax_rows(x)


def greedy_accept(
    draft_tokens: Tensor, target_tokens: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """Longest prefix of ``draft_tokens`` [B, γ] that equals ``target_tokens`` [B, γ + 1], at most ``proposal_length`` [B].

    ``forced`` [B] sets the number of accepted drafts instead (0 or more), still capped by γ and the proposal. All int64.
    """
    if on_triton(draft_tokens):
        from dspark_kernels.accept import kernel

        return kernel.greedy_accept(draft_tokens, target_tokens, proposal_length, forced=forced)
    return reference.greedy_accept(draft_tokens, target_tokens, proposal_length, forced=forced)


def greedy_accept_logits(
    draft_tokens: Tensor, target_logits: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """`greedy_accept` of the argmax of ``target_logits`` [B·(γ + 1), V], in two launches; see `argmax_rows` for ties and NaN."""
    if on_triton(draft_tokens):
        from dspark_kernels.accept import kernel

        return kernel.greedy_accept_logits(draft_tokens, target_logits, proposal_length, forced=forced)
    return reference.greedy_accept_logits(draft_tokens, target_logits, proposal_length, forced=forced)


__all__ = ["argmax_rows", "greedy_accept", "greedy_accept_logits", "Accepted"]
