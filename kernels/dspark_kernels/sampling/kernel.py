"""Sampling without a sort, a cumulative sum over the vocabulary, or a distribution of the target's in memory.

A draw first chooses a tile of the vocabulary by the tiles' masses and then a token within it; both are the inverse of the cumulative
sum, by the same number as in the reference. `rows` has what describes a row, `cut` finds what top-k and top-p keep of it,
`acceptance` holds drafts against it.
"""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.accept.reference import Accepted
from dspark_kernels.chain import chains, options, wait
from dspark_kernels.sampling.acceptance import bonus_kernel, residual_kernel
from dspark_kernels.sampling.cut import cut_kernel
from dspark_kernels.sampling.reference import FLOOR, SamplingRows
from dspark_kernels.sampling.rows import (
    Described,
    choose,
    describe_kernel,
    kept_by,
    logits_at,
    scale_of,
    tiles_of,
    within,
)

TILE = 2048
"""Logits of a program; `cut_kernel`, one program a row, takes several at a time."""


@triton.jit
def _uniforms_kernel(
    requests_ptr, anchors_ptr, out_ptr, seed, SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, CHAINED: tl.constexpr
):
    wait(CHAINED)
    row = tl.program_id(0)
    slot = tl.arange(0, BLOCK_S)
    request = tl.load(requests_ptr + row)
    anchor = tl.load(anchors_ptr + row)
    zero = slot * 0
    words = tl.philox(
        seed, zero + request.to(tl.uint32), zero + anchor.to(tl.uint32), slot.to(tl.uint32),
        zero + (request >> 32).to(tl.uint32),
    )  # fmt: skip
    at = out_ptr + (row * SLOTS + slot) * 3
    inside = slot < SLOTS
    for use in tl.static_range(3):
        # An int64 first: an unsigned word has no other exact way to float64 in every version.
        tl.store(at + use, (words[use].to(tl.int64).to(tl.float64) + 0.5) / 4294967296.0, mask=inside)


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    maxima_ptr,
    masses_ptr,
    firsts_ptr,
    least_ptr,
    last_ptr,
    noise_ptr,
    probs_ptr,
    tokens_ptr,
    logits_stride,
    noise_stride,
    probs_stride,
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale, is_greedy = scale_of(row, temperature_ptr, greedy_ptr)
    top, masses, mass, best = tiles_of(row, scale, maxima_ptr, masses_ptr, firsts_ptr, V, P, BLOCK_P)
    v = tile * TILE_V + tl.arange(0, TILE_V)
    inside = v < V
    x = logits_at(logits_ptr + row * logits_stride, v, inside)
    kept = inside & kept_by(x, v, row, least_ptr, last_ptr)
    weights = tl.where(kept, tl.exp((x - top) * scale), 0.0)
    if probs_ptr is not None:
        made = tl.where(is_greedy, (v == best).to(tl.float32), weights / mass)
        tl.store(probs_ptr + row * probs_stride + v, made, mask=inside)
    chosen, goal = choose(masses, tl.load(noise_ptr + row * noise_stride), BLOCK_P)
    drawn = within(weights, v, goal, V)
    token = tl.where(is_greedy, best.to(tl.int64), drawn)
    tl.store(tokens_ptr + row, token, mask=tile == tl.where(is_greedy, 0, chosen))


def uniforms(seed: int, requests: Tensor, anchors: Tensor, num_slots: int) -> Tensor:
    """As `reference.uniforms`, the same bits; one kernel."""
    out = torch.empty(len(requests), num_slots, 3, dtype=torch.float64, device=requests.device)
    _uniforms_kernel[(len(requests),)](
        requests, anchors, out, seed, SLOTS=num_slots, BLOCK_S=triton.next_power_of_2(num_slots), num_warps=1,
        **options(chains(requests.device)),
    )  # fmt: skip
    return out


def _geometry(vocab: int) -> dict[str, Any]:
    tile = min(TILE, triton.next_power_of_2(vocab))
    tiles = -(-vocab // tile)
    return {"V": vocab, "P": tiles, "BLOCK_P": triton.next_power_of_2(tiles), "TILE_V": tile}


def _describe(
    logits: Tensor, rows: SamplingRows, num_places: int, width: int, row_of_place: Tensor | None
) -> Described:
    """``logits`` [N, V]; ``width`` places a request."""
    (num_rows, vocab), device = logits.shape, logits.device
    g, chain = _geometry(vocab), options(chains(device))
    tiles = g["P"]
    floats = torch.empty(2, num_places, tiles, dtype=torch.float32, device=device)
    firsts = torch.empty(num_places, tiles, dtype=torch.int32, device=device)
    shape = {k: g[k] for k in ("V", "P", "TILE_V")}
    describe_kernel[(num_places, tiles)](
        logits, rows.temperature, rows.is_greedy, row_of_place, floats[0], floats[1], firsts, logits.stride(0), num_rows,
        W=width, **shape, num_warps=4, **chain,
    )  # fmt: skip
    if not rows.cuts:
        return Described(floats[0], floats[1], firsts, None, None)
    least = torch.empty(num_places, dtype=torch.float32, device=device)
    last = torch.empty(num_places, dtype=torch.int32, device=device)
    block = min(8192, triton.next_power_of_2(vocab))
    cut_kernel[(num_places,)](
        logits, rows.temperature, rows.is_greedy, rows.top_k, rows.top_p, row_of_place, floats[0], floats[1], firsts, least, last,
        logits.stride(0), num_rows, W=width, **g, BLOCK=block, LAST_BIT=16 if logits.dtype == torch.bfloat16 else 0,
        num_warps=max(1, min(16, block // 256)), **chain,
    )  # fmt: skip
    return Described(floats[0], floats[1], firsts, least, last)


def sample(logits: Tensor, rows: SamplingRows, noise: Tensor, probs: Tensor | None = None) -> Tensor:
    """As `reference.sample`; two kernels, three with a cut."""
    b = len(logits)
    _check(logits, rows, b)
    d = _describe(logits, rows, b, 1, None)
    g = _geometry(logits.shape[1])
    tokens = torch.empty(b, dtype=torch.int64, device=logits.device)
    _sample_kernel[(b, g["P"])](
        logits, rows.temperature, rows.is_greedy, *d, noise, probs, tokens, logits.stride(0), noise.stride(0),
        0 if probs is None else probs.stride(0), **g, num_warps=4, **options(chains(logits.device)),
    )  # fmt: skip
    return tokens


def chain_accept_logits(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_logits: Tensor,
    rows: SamplingRows,
    lengths: Tensor,
    *,
    accept_noise: Tensor,
    bonus_noise: Tensor,
    row_of_place: Tensor | None = None,
) -> Accepted:
    """As `reference.chain_accept_logits`; three kernels, four with a cut."""
    (b, gamma), device = draft_tokens.shape, draft_tokens.device
    _check(target_logits, rows, b)
    if not gamma:
        if row_of_place is not None:
            target_logits = target_logits[row_of_place.clamp(max=len(target_logits) - 1)]
        bonus = sample(target_logits, rows, bonus_noise[:, 0])
        return Accepted(torch.zeros_like(bonus), bonus, bonus[:, None])
    d = _describe(target_logits, rows, b * (gamma + 1), gamma + 1, row_of_place)
    g = _geometry(target_logits.shape[1])
    num_accepted, bonus = (torch.empty(b, dtype=torch.int64, device=device) for _ in range(2))
    out = torch.empty(b, gamma + 1, dtype=torch.int64, device=device)
    masses = torch.empty(2, b, g["P"], dtype=torch.float32, device=device)
    chain: dict[str, Any] = {"GAMMA": gamma, **g, "num_warps": 4, **options(chains(device))}
    common = (draft_tokens, draft_probs, target_logits, lengths, rows.temperature, rows.is_greedy, row_of_place, *d)
    strides = (draft_tokens.stride(0), draft_probs.stride(0), draft_probs.stride(1), target_logits.stride(0))
    residual_kernel[(b, g["P"])](
        *common,
        accept_noise,
        num_accepted,
        *masses,
        *strides,
        *accept_noise.stride(),
        len(target_logits),
        FLOOR,
        **chain,
    )
    bonus_kernel[(b,)](
        *common, bonus_noise, num_accepted, *masses, bonus, out, *strides, *bonus_noise.stride(), len(target_logits), FLOOR,
        BLOCK_W=triton.next_power_of_2(gamma + 1), **chain,
    )  # fmt: skip
    return Accepted(num_accepted, bonus, out)


def _check(logits: Tensor, rows: SamplingRows, b: int) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be [N, V] with a contiguous vocabulary; call .contiguous()."
        )
    for name in ("temperature", "top_k", "top_p", "is_greedy"):
        setting = getattr(rows, name)
        if setting.shape != (b,) or not setting.is_contiguous():
            raise ValueError(f"{name} {tuple(setting.shape)} must be [{b}] and contiguous, a value a request.")
