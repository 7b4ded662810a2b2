"""Which drafts are kept and what is drawn behind them: the residual's mass a tile, then a tile and a token of it."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.chain import wait
from dspark_kernels.sampling.rows import choose, kept_by, logits_at, row_of, scale_of, tiles_of, within


@triton.jit
def residual_kernel(
    drafts_ptr,
    draft_probs_ptr,
    logits_ptr,
    lengths_ptr,
    temperature_ptr,
    greedy_ptr,
    rows_ptr,
    maxima_ptr,
    masses_ptr,
    firsts_ptr,
    least_ptr,
    last_ptr,
    accept_noise_ptr,
    num_accepted_ptr,
    residual_ptr,
    target_ptr,
    drafts_stride,
    probs_request_stride,
    probs_stride,
    logits_stride,
    noise_request_stride,
    noise_stride,
    num_rows,
    floor,
    GAMMA: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """How many drafts are kept, and per tile the mass of the residual and of the target where the block ends."""
    wait(CHAINED)
    W: tl.constexpr = GAMMA + 1
    request, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    scale, is_greedy = scale_of(request, temperature_ptr, greedy_ptr)
    kept = tl.zeros([], tl.int32)
    going = tl.full([], 1, tl.int32)
    for k in tl.static_range(GAMMA):
        place = request * W + k
        row, known = row_of(place, rows_ptr, num_rows)
        top, _, mass, best = tiles_of(place, scale, maxima_ptr, masses_ptr, firsts_ptr, V, P, BLOCK_P)
        token = tl.load(drafts_ptr + request * drafts_stride + k)
        token = tl.minimum(tl.maximum(token, 0), V - 1)
        x = logits_at(logits_ptr + row * logits_stride, token, known)
        p_t = tl.where(kept_by(x, token, place, least_ptr, last_ptr), tl.exp((x - top) * scale) / mass, 0.0)
        p_t = tl.where(is_greedy, (token == best).to(tl.float32), p_t)
        p_d = tl.load(draft_probs_ptr + request * probs_request_stride + k * probs_stride + token)
        noise = tl.load(accept_noise_ptr + request * noise_request_stride + k * noise_stride)
        ratio = p_t.to(tl.float64) / tl.maximum(p_d, floor).to(tl.float64)
        passed = known & (k < length) & (noise < ratio)
        going = going & passed.to(tl.int32)
        kept += going
    if tile == 0:
        tl.store(num_accepted_ptr + request, kept.to(tl.int64))
    residual, target, _ = _at_the_end(
        request, kept, length, tile, draft_probs_ptr, logits_ptr, scale, is_greedy, rows_ptr, maxima_ptr, masses_ptr, firsts_ptr,
        least_ptr, last_ptr, probs_request_stride, probs_stride, logits_stride, num_rows, W, V, P, BLOCK_P, TILE_V,
    )  # fmt: skip
    tl.store(residual_ptr + request * P + tile, tl.sum(residual, axis=0))
    tl.store(target_ptr + request * P + tile, tl.sum(target, axis=0))


@triton.jit
def _at_the_end(
    request, kept, length, tile, draft_probs_ptr, logits_ptr, scale, is_greedy, rows_ptr, maxima_ptr, masses_ptr, firsts_ptr,
    least_ptr, last_ptr, probs_request_stride, probs_stride, logits_stride, num_rows,
    W: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """A tile of the residual (0 where no draft was refused) and of the target's distribution at the place behind ``kept``."""
    place = request * W + kept
    row, known = row_of(place, rows_ptr, num_rows)
    top, _, mass, best = tiles_of(place, scale, maxima_ptr, masses_ptr, firsts_ptr, V, P, BLOCK_P)
    v = tile * TILE_V + tl.arange(0, TILE_V)
    inside = (v < V) & known
    x = logits_at(logits_ptr + row * logits_stride, v, inside)
    held = inside & kept_by(x, v, place, least_ptr, last_ptr)
    target = tl.where(held, tl.exp((x - top) * scale) / mass, 0.0)
    target = tl.where(is_greedy, (v == best).to(tl.float32), target)
    refused = kept < length
    drafted = tl.load(
        draft_probs_ptr + request * probs_request_stride + kept * probs_stride + v, mask=inside & refused, other=0.0
    )
    return tl.where(refused, tl.maximum(target - drafted, 0.0), 0.0), target, v


@triton.jit
def bonus_kernel(
    drafts_ptr,
    draft_probs_ptr,
    logits_ptr,
    lengths_ptr,
    temperature_ptr,
    greedy_ptr,
    rows_ptr,
    maxima_ptr,
    masses_ptr,
    firsts_ptr,
    least_ptr,
    last_ptr,
    bonus_noise_ptr,
    num_accepted_ptr,
    residual_ptr,
    target_ptr,
    bonus_ptr,
    out_ptr,
    drafts_stride,
    probs_request_stride,
    probs_stride,
    logits_stride,
    noise_request_stride,
    noise_stride,
    num_rows,
    floor,
    GAMMA: tl.constexpr,
    BLOCK_W: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    W: tl.constexpr = GAMMA + 1
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    kept = tl.load(num_accepted_ptr + request).to(tl.int32)
    scale, is_greedy = scale_of(request, temperature_ptr, greedy_ptr)
    p = tl.arange(0, BLOCK_P)
    residual = tl.load(residual_ptr + request * P + p, mask=p < P, other=0.0)
    target = tl.load(target_ptr + request * P + p, mask=p < P, other=0.0)
    usable = tl.sum(residual, axis=0) > floor
    noise = tl.load(bonus_noise_ptr + request * noise_request_stride + kept * noise_stride)
    tile, goal = choose(tl.where(usable, residual, target), noise, BLOCK_P)
    of_residual, of_target, v = _at_the_end(
        request, kept, length, tile, draft_probs_ptr, logits_ptr, scale, is_greedy, rows_ptr, maxima_ptr, masses_ptr, firsts_ptr,
        least_ptr, last_ptr, probs_request_stride, probs_stride, logits_stride, num_rows, W, V, P, BLOCK_P, TILE_V,
    )  # fmt: skip
    bonus = within(tl.where(usable, of_residual, of_target), v, goal, V)
    tl.store(bonus_ptr + request, bonus)
    column = tl.arange(0, BLOCK_W)
    drafts = tl.load(drafts_ptr + request * drafts_stride + column, mask=column < GAMMA, other=0)
    tl.store(out_ptr + request * W + column, tl.where(column == kept, bonus, drafts), mask=column < W)
