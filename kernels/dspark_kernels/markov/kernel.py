"""The Markov step as a product, sum and argmax that store no logits; a walk of γ steps without a wait.

All of W2 is read at each step, so its bytes are the floor. One wave of programs shares out the tiles of the vocabulary; each
keeps its best value and index a column in registers and leaves one candidate a request. For small batches the next step's
programs each reduce all candidates themselves (a few kilobytes from L2, no kernel more); for larger ones a kernel between
the steps does it once. Odd steps take the tiles in reverse: the part of W2 that was read last is still in L2.
"""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait
from dspark_kernels.markov.reference import Step, Walk

FUSED_BATCH = 8
"""Up to this batch the next step reduces the candidates: B · programs² · 8 bytes of L2 reads against one launch."""


@triton.jit
def _winner(values_ptr, indices_ptr, rows, real, PROGRAMS: tl.constexpr, BLOCK_PROGRAMS: tl.constexpr):
    """The index of the best of each row's candidates; the lowest among equals."""
    p = tl.arange(0, BLOCK_PROGRAMS)
    place = rows[:, None] * PROGRAMS + p[None, :]
    inside = real[:, None] & (p[None, :] < PROGRAMS)
    values = tl.load(values_ptr + place, mask=inside, other=float("-inf"))
    indices = tl.load(indices_ptr + place, mask=inside, other=2147483647)
    best = tl.max(values, axis=1)
    return tl.min(tl.where(values == best[:, None], indices, 2147483647), axis=1)


@triton.jit
def _step(
    base_ptr,
    prev_ptr,
    w1_ptr,
    w2_ptr,
    noise_ptr,
    corrected_ptr,
    embedded_ptr,
    tokens_ptr,
    in_values_ptr,
    in_indices_ptr,
    out_values_ptr,
    out_indices_ptr,
    batch,
    base_stride,
    prev_stride,
    noise_stride,
    corrected_stride,
    embedded_stride,
    tokens_stride,
    inv_temperature,
    V: tl.constexpr,
    R: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    REDUCE_FIRST: tl.constexpr,
    REVERSED: tl.constexpr,
    NOISE: tl.constexpr,
    CORRECTED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    program = tl.program_id(0)
    rows = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    real = rows < batch
    cols = tl.arange(0, BLOCK_V)
    ranks = tl.arange(0, BLOCK_R)

    if REDUCE_FIRST:
        prev = _winner(in_values_ptr, in_indices_ptr, rows, real, PROGRAMS, BLOCK_PROGRAMS).to(tl.int64)
        tl.store(tokens_ptr + rows * tokens_stride, prev, mask=real & (program == 0))
    else:
        prev = tl.load(prev_ptr + rows * prev_stride, mask=real, other=0).to(tl.int64)
    # A padded request may carry any token; one outside the vocabulary reads zeros.
    known = real & (prev >= 0) & (prev < V)
    fits = ranks[None, :] < R
    embedded = tl.load(w1_ptr + prev[:, None] * R + ranks[None, :], mask=known[:, None] & fits, other=0.0)
    tl.store(
        embedded_ptr + rows[:, None] * embedded_stride + ranks[None, :],
        embedded,
        mask=real[:, None] & fits & (program == 0),
    )

    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    mine = tl.cdiv(TILES - program, PROGRAMS)
    best = tl.full([BLOCK_B, BLOCK_V], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK_B, BLOCK_V], tl.int32)
    for i in tl.range(0, mine, num_stages=STAGES):
        turn = mine - 1 - i if REVERSED else i
        v = (program + turn * PROGRAMS) * BLOCK_V + cols
        held = v < V
        inside = real[:, None] & held[None, :]
        # Read once, so first to go: W2 comes again in the next step.
        base = tl.load(
            base_ptr + rows[:, None] * base_stride + v[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        )
        w2 = tl.load(w2_ptr + v[:, None].to(tl.int64) * R + ranks[None, :], mask=held[:, None] & fits, other=0.0)
        bias = tl.dot(embedded, tl.trans(w2), input_precision=PRECISION)
        # Rounded where torch rounds: after the product and after the sum.
        dtype = base.dtype
        corrected = (base.to(tl.float32) + bias.to(dtype).to(tl.float32)).to(dtype)
        if CORRECTED:
            tl.store(corrected_ptr + rows[:, None] * corrected_stride + v[None, :], corrected, mask=inside)
        scores = corrected.to(tl.float32)
        if NOISE:
            noise = tl.load(
                noise_ptr + rows[:, None] * noise_stride + v[None, :],
                mask=inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            scores = scores * inv_temperature + noise
        scores = tl.where(held[None, :], scores, float("-inf"))
        if REVERSED:
            better = scores >= best
        else:
            better = scores > best
        best = tl.where(better, scores, best)
        index = tl.where(better, v[None, :], index)

    top = tl.max(best, axis=1)
    # Where nothing won (all NaN or −inf) program 0 offers index 0, the lowest: any row yields a token of the vocabulary.
    lowest = tl.min(tl.where(best == top[:, None], index, 2147483647), axis=1)
    tl.store(out_values_ptr + rows * PROGRAMS + program, top, mask=real)
    tl.store(out_indices_ptr + rows * PROGRAMS + program, lowest, mask=real)


@triton.jit
def _reduce(
    values_ptr,
    indices_ptr,
    tokens_ptr,
    tokens_stride,
    PROGRAMS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    winner = _winner(values_ptr, indices_ptr, rows, rows >= 0, PROGRAMS, BLOCK_PROGRAMS)
    tl.store(tokens_ptr + rows * tokens_stride, winner.to(tl.int64))


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def geometry(
    batch: int, vocab: int, rank: int, dtype: torch.dtype, device: torch.device, noise: bool
) -> dict[str, int]:
    """Tiles, grid and depth of the step, from static shapes alone."""
    block_r = max(16, 1 << (rank - 1).bit_length())
    row_bytes = block_r * dtype.itemsize
    # The predecessors' rows of W1 stay in shared memory (64 KiB at most), beside tiles of W2 of 32 KiB, some in flight.
    block_b = min(128, max(16, 64 * 1024 // row_bytes), max(16, 1 << (batch - 1).bit_length()))
    block_v = max(16, min(128, 32 * 1024 // row_bytes))
    if noise and block_b == 128:
        block_v = max(16, block_v // 2)
    waves = 2 if block_b <= 32 else 1
    return {
        "BLOCK_B": block_b,
        "BLOCK_V": block_v,
        "BLOCK_R": block_r,
        "PROGRAMS": min(-(-vocab // block_v), _num_processors(device) * waves),
        "STAGES": 2 if dtype == torch.float32 else 3,
        "num_warps": 8 if block_b >= 64 else 4,
    }


def markov_step(
    base: Tensor,
    prev_tokens: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    noise: Tensor | None = None,
    temperature: float = 1.0,
    with_corrected: bool = False,
) -> Step:
    """As `reference.markov_step`: a walk of one."""
    walk = markov_walk(
        base[:, None],
        prev_tokens,
        w1,
        w2,
        noise=None if noise is None else noise[:, None],
        temperature=temperature,
        with_corrected=with_corrected,
    )
    return Step(walk.tokens[:, 0], None if walk.corrected is None else walk.corrected[:, 0], walk.embedded[:, 0])


def markov_walk(
    base: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    noise: Tensor | None = None,
    temperature: float = 1.0,
    with_corrected: bool = False,
    fused: bool | None = None,
    turning: bool = True,
    tiles: dict[str, int] | None = None,
) -> Walk:
    """As `reference.markov_walk`; γ + 1 launches where ``fused`` (None: up to `FUSED_BATCH` requests), else 2γ.

    For trials: ``turning`` False reads W2 forward at every step, ``tiles`` overrides entries of `geometry`.
    """
    (b, gamma, vocab), rank, device = base.shape, w1.shape[1], base.device
    _check(base, anchors, w1, w2, noise, temperature)
    anchors = anchors.contiguous()
    g = geometry(b, vocab, rank, w2.dtype, device, noise is not None) | (tiles or {})
    programs, block_programs = g["PROGRAMS"], triton.next_power_of_2(g["PROGRAMS"])
    fused = b <= FUSED_BATCH if fused is None else fused
    tokens = torch.empty(b, gamma, dtype=torch.int64, device=device)
    embedded = torch.empty(b, gamma, rank, dtype=w1.dtype, device=device)
    corrected = torch.empty(b, gamma, vocab, dtype=base.dtype, device=device) if with_corrected else None
    values = torch.empty(gamma, b, programs, dtype=torch.float32, device=device)
    indices = torch.empty(gamma, b, programs, dtype=torch.int32, device=device)
    chain = options(chains(device))
    for k in range(gamma):
        reduce_first = fused and k > 0
        prev = anchors if k == 0 else tokens[:, k - 1]
        _step[(programs, -(-b // g["BLOCK_B"]))](
            base[:, k],
            prev,
            w1,
            w2,
            base if noise is None else noise[:, k],
            base if corrected is None else corrected[:, k],
            embedded[:, k],
            prev,
            values[max(k - 1, 0)],
            indices[max(k - 1, 0)],
            values[k],
            indices[k],
            b,
            base.stride(0),
            prev.stride(0),
            0 if noise is None else noise.stride(0),
            0 if corrected is None else corrected.stride(0),
            embedded.stride(0),
            prev.stride(0),
            1.0 / temperature,
            V=vocab,
            R=rank,
            BLOCK_PROGRAMS=block_programs,
            REDUCE_FIRST=reduce_first,
            REVERSED=turning and k % 2 == 1,
            NOISE=noise is not None,
            CORRECTED=with_corrected,
            PRECISION="ieee" if w2.dtype == torch.float32 else "tf32",
            **g,
            **chain,
        )
        if not fused or k == gamma - 1:
            _reduce[(b,)](
                values[k],
                indices[k],
                tokens[:, k],
                tokens.stride(0),
                PROGRAMS=programs,
                BLOCK_PROGRAMS=block_programs,
                num_warps=1,
                **chain,
            )
    return Walk(tokens, corrected, embedded)


def _check(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, noise: Tensor | None, temperature: float) -> None:
    b, _, vocab = base.shape
    if w1.shape != w2.shape or w1.shape[0] != vocab or anchors.shape != (b,):
        raise ValueError(
            f"base {tuple(base.shape)}, anchors {tuple(anchors.shape)}, w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} "
            "do not belong together: both tables are [V, r]."
        )
    if base.stride(2) != 1 or not w1.is_contiguous() or not w2.is_contiguous():
        raise ValueError("w1, w2 and the vocabulary of base must be contiguous; call .contiguous().")
    if not base.dtype == w1.dtype == w2.dtype:
        raise ValueError(f"base {base.dtype}, w1 {w1.dtype} and w2 {w2.dtype} must share a dtype.")
    if noise is not None and (noise.shape != base.shape or noise.stride(2) != 1):
        raise ValueError(
            f"noise {tuple(noise.shape)} must have the shape of base, {tuple(base.shape)}, and be contiguous."
        )
    if noise is not None and not temperature > 0.0:
        raise ValueError(f"temperature={temperature} must be over 0 with noise; leave the noise out for greedy tokens.")
