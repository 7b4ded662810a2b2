"""Argmax of few long rows in two stages, and greedy acceptance with the second stage inside."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.accept.reference import Accepted

BLOCK_V = 2048


@triton.jit
def _candidates(x_ptr, values_ptr, indices_ptr, x_stride, V: tl.constexpr, PARTS: tl.constexpr, BLOCK_V: tl.constexpr):
    """The best of one part of a row, with its index."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    CHUNK: tl.constexpr = ((V + BLOCK_V - 1) // BLOCK_V + PARTS - 1) // PARTS * BLOCK_V
    begin = part * CHUNK
    end = tl.minimum(begin + CHUNK, V)
    cols = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK_V], tl.int32)
    for start in tl.range(begin, end, BLOCK_V, num_stages=3):
        v = start + cols
        x = tl.load(x_ptr + row * x_stride + v, mask=v < end, other=float("-inf")).to(tl.float32)
        better = x > best
        best = tl.where(better, x, best)
        index = tl.where(better, v, index)
    top = tl.max(best, axis=0)
    tl.store(values_ptr + row * PARTS + part, top)
    tl.store(indices_ptr + row * PARTS + part, tl.min(tl.where(best == top, index, 2147483647), axis=0))


@triton.jit
def _winners(values_ptr, indices_ptr, rows, real, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """The index of the best candidate of each of ``rows``; the lowest among equals."""
    p = tl.arange(0, BLOCK_PARTS)
    place = rows[:, None] * PARTS + p[None, :]
    inside = real[:, None] & (p[None, :] < PARTS)
    values = tl.load(values_ptr + place, mask=inside, other=float("-inf"))
    indices = tl.load(indices_ptr + place, mask=inside, other=2147483647)
    best = tl.max(values, axis=1)
    return tl.min(tl.where(values == best[:, None], indices, 2147483647), axis=1).to(tl.int64)


@triton.jit
def _reduce(
    values_ptr, indices_ptr, out_ptr, num_rows, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = rows < num_rows
    tl.store(out_ptr + rows, _winners(values_ptr, indices_ptr, rows, real, PARTS, BLOCK_PARTS), mask=real)


@triton.jit
def _accept(
    draft_ptr,
    target_ptr,
    values_ptr,
    indices_ptr,
    proposal_ptr,
    forced_ptr,
    num_ptr,
    bonus_ptr,
    out_ptr,
    draft_stride,
    target_stride,
    GAMMA: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FORCED: tl.constexpr,
    FROM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_W)
    verified = cols <= GAMMA
    if FROM_PARTS:
        rows = request * (GAMMA + 1) + cols
        target = _winners(values_ptr, indices_ptr, rows, verified, PARTS, BLOCK_PARTS)
    else:
        target = tl.load(target_ptr + request * target_stride + cols, mask=verified, other=0)
    draft = tl.load(draft_ptr + request * draft_stride + cols, mask=cols < GAMMA, other=0)
    if FORCED:
        kept = tl.minimum(tl.load(forced_ptr + request), GAMMA)
    else:
        # The first place that does not hold; place γ never does.
        kept = tl.min(tl.where((draft == target) & (cols < GAMMA), BLOCK_W, cols), axis=0).to(tl.int64)
    kept = tl.minimum(kept, tl.load(proposal_ptr + request))
    bonus = tl.sum(tl.where(cols == kept, target, 0), axis=0)
    tl.store(num_ptr + request, kept)
    tl.store(bonus_ptr + request, bonus)
    tl.store(out_ptr + request * (GAMMA + 1) + cols, tl.where(cols == kept, bonus, draft), mask=verified)


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _first_stage(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Candidates (values, indices) [N, parts] of ``x`` [N, V], and parts."""
    if x.dim() != 2 or x.shape[0] == 0 or x.stride(1) != 1:
        raise ValueError(
            f"rows of shape {tuple(x.shape)} and strides {x.stride()} must be [N, V], not empty, contiguous."
        )
    n, vocab = x.shape
    wanted = max(1, 4 * _num_processors(x.device) // n)
    blocks = -(-vocab // BLOCK_V)
    parts = -(-blocks // -(-blocks // min(wanted, blocks)))
    values = torch.empty(n, parts, dtype=torch.float32, device=x.device)
    indices = torch.empty(n, parts, dtype=torch.int32, device=x.device)
    _candidates[(n, parts)](x, values, indices, x.stride(0), V=vocab, PARTS=parts, BLOCK_V=BLOCK_V, num_warps=8)
    return values, indices, parts


def argmax_rows(x: Tensor) -> Tensor:
    """As `reference.argmax_rows`."""
    values, indices, parts = _first_stage(x)
    if parts == 1:
        return indices.view(-1).to(torch.int64)
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    _reduce[(x.shape[0],)](
        values,
        indices,
        out,
        x.shape[0],
        PARTS=parts,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCK_N=1,
        num_warps=1,
    )
    return out


def greedy_accept(
    draft_tokens: Tensor, target_tokens: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """As `reference.greedy_accept`."""
    return _launch(draft_tokens, target_tokens, None, proposal_length, forced)


def greedy_accept_logits(
    draft_tokens: Tensor, target_logits: Tensor, proposal_length: Tensor, *, forced: Tensor | None = None
) -> Accepted:
    """As `reference.greedy_accept_logits`, in two launches."""
    return _launch(draft_tokens, None, target_logits, proposal_length, forced)


def _launch(
    draft: Tensor, target: Tensor | None, logits: Tensor | None, proposal: Tensor, forced: Tensor | None
) -> Accepted:
    b, gamma = draft.shape
    got = (b, gamma + 1) if logits is None else (b * (gamma + 1),)
    shape = tuple((draft if target is None else target).shape) if logits is None else tuple(logits.shape[:1])
    if shape != got or proposal.shape != (b,) or (forced is not None and forced.shape != (b,)):
        raise ValueError(
            f"drafts {tuple(draft.shape)}, target rows {shape} and proposals {tuple(proposal.shape)} do not belong together: "
            f"{gamma + 1} verified rows a request."
        )
    proposal = proposal.contiguous()
    target = None if target is None else target.contiguous()
    forced = None if forced is None else forced.contiguous()
    values, indices, parts = (draft, draft, 1) if logits is None else _first_stage(logits)
    num_accepted = torch.empty(b, dtype=torch.int64, device=draft.device)
    bonus = torch.empty_like(num_accepted)
    out_tokens = torch.empty(b, gamma + 1, dtype=torch.int64, device=draft.device)
    _accept[(b,)](
        draft,
        draft if target is None else target,
        values,
        indices,
        proposal,
        proposal if forced is None else forced,
        num_accepted,
        bonus,
        out_tokens,
        draft.stride(0),
        0 if target is None else target.stride(0),
        GAMMA=gamma,
        BLOCK_W=triton.next_power_of_2(gamma + 1),
        FORCED=forced is not None,
        FROM_PARTS=logits is not None,
        PARTS=parts,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        num_warps=1 if logits is None else 4,
    )
    return Accepted(num_accepted, bonus, out_tokens)
