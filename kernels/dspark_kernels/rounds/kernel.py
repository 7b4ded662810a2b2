"""A round's integers in one kernel before each forward and one after the last: a dozen small ones else."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.accept.reference import Accepted
from dspark_kernels.chain import chains, options, wait
from dspark_kernels.rounds.reference import Rows


@triton.jit
def _rows_kernel(
    anchors_ptr,
    seq_lens_ptr,
    slots_ptr,
    limits_ptr,
    drafts_ptr,  # [B, W - 1] or None
    ids_ptr,
    positions_ptr,
    key_limits_ptr,
    req_slots_ptr,
    token_slots_ptr,
    drafts_stride,
    mask_token,
    dummy_slot,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    request = tl.program_id(0)
    column = tl.arange(0, BLOCK_W)
    inside = column < WIDTH
    length = tl.load(seq_lens_ptr + request)
    takes_part = length < tl.load(limits_ptr + request)
    start = tl.where(takes_part, length, 0)
    slot = tl.where(takes_part, tl.load(slots_ptr + request), dummy_slot)
    anchor = tl.load(anchors_ptr + request)
    positions = start + column
    if drafts_ptr is None:
        ids = tl.where(column == 0, anchor, mask_token)
        limits = tl.zeros_like(positions) + start + WIDTH
    else:
        drafts = tl.load(drafts_ptr + request * drafts_stride + column - 1, mask=inside & (column > 0), other=0)
        ids = tl.where(column == 0, anchor, drafts)
        limits = positions + 1
    at = request * WIDTH + column
    tl.store(ids_ptr + at, ids, mask=inside)
    tl.store(positions_ptr + at, positions, mask=inside)
    tl.store(key_limits_ptr + at, limits, mask=inside)
    tl.store(token_slots_ptr + at, tl.zeros_like(positions) + slot, mask=inside)
    tl.store(req_slots_ptr + request, slot)


@triton.jit
def _commit_kernel(
    drafts_ptr,  # [B, γ]
    lengths_ptr,  # [B]
    target_ptr,  # [B, W]; where num_accepted is given the committed tokens
    num_accepted_ptr,  # [B] or None: by drafts that equal the target's
    anchors_ptr,
    seq_lens_ptr,
    slots_ptr,
    limits_ptr,
    packed_ptr,  # [B, W + 2]
    simulated_ptr,  # [S, B'] or None
    num_rounds_ptr,
    context_slots_ptr,  # [B·W]
    results_ptr,  # [D, B, W + 3] or None; may lie in pinned host memory
    stop_ids_ptr,  # [S] or None
    num_requests,
    drafts_stride,
    packed_stride,
    simulated_rows,
    simulated_stride,
    results_depth,
    results_round_stride,
    results_stride,
    dummy_slot,
    GAMMA: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    W: tl.constexpr = GAMMA + 1
    request = tl.arange(0, BLOCK_B)
    real = request < num_requests
    column = tl.arange(0, BLOCK_W)[None, :]
    inside = real[:, None] & (column < W)
    length = tl.load(seq_lens_ptr + request, mask=real, other=0)
    takes_part = length < tl.load(limits_ptr + request, mask=real, other=0)
    proposed = tl.load(lengths_ptr + request, mask=real, other=0)
    drafted = real[:, None] & (column < GAMMA)
    drafts = tl.load(drafts_ptr + request[:, None] * drafts_stride + column, mask=drafted, other=0)
    target = tl.load(target_ptr + request[:, None] * W + column, mask=inside, other=0)
    round_ = tl.load(num_rounds_ptr)
    if num_accepted_ptr is not None:
        kept = tl.load(num_accepted_ptr + request, mask=real, other=0)
    elif simulated_ptr is not None:
        turn = round_ % simulated_rows
        kept = tl.load(simulated_ptr + turn * simulated_stride + request, mask=real, other=0)
        kept = tl.minimum(kept, GAMMA)
    else:
        # The first place that does not hold; place γ never does.
        holds = (drafts == target) & (column < GAMMA)
        kept = tl.min(tl.where(holds, BLOCK_W, column + tl.zeros_like(target)), axis=1)
    kept = tl.minimum(kept, proposed)
    bonus = tl.sum(tl.where(column == kept[:, None], target, 0), axis=1)
    committed = tl.where(takes_part, kept + 1, 0)
    tokens = tl.where(column == kept[:, None], bonus[:, None], drafts)
    if stop_ids_ptr is not None:
        stops = tokens != tokens
        for i in range(NUM_STOPS):
            stops = stops | (tokens == tl.load(stop_ids_ptr + i))
        stops = stops & (column < committed[:, None])
        until = tl.min(tl.where(stops, column + 1, BLOCK_W + 1), axis=1)
        tl.store(limits_ptr + request, tl.zeros_like(length), mask=real & (until <= W))
        committed = tl.minimum(committed, until)
    slot = tl.load(slots_ptr + request, mask=real, other=0)
    context = tl.where(column < committed[:, None], slot[:, None], dummy_slot)
    tl.store(context_slots_ptr + request[:, None] * W + column, context, mask=inside)
    packed = packed_ptr + request * packed_stride
    tl.store(packed[:, None] + column, tokens, mask=inside)
    tl.store(packed + W, committed, mask=real)
    tl.store(packed + W + 1, proposed, mask=real)
    if results_ptr is not None:
        sent = results_ptr + (round_ % results_depth) * results_round_stride + request * results_stride
        tl.store(sent[:, None] + column, tokens, mask=inside)
        tl.store(sent + W, committed, mask=real)
        tl.store(sent + W + 1, proposed, mask=real)
        tl.store(sent + W + 2, tl.zeros_like(committed) + round_, mask=real)
    tl.store(anchors_ptr + request, bonus, mask=real & takes_part)
    tl.store(seq_lens_ptr + request, length + committed, mask=real)
    tl.store(num_rounds_ptr, round_ + 1)


def block_rows(
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    drafts: Tensor | None,
    *,
    width: int,
    mask_token: int,
    dummy_slot: int,
) -> Rows:
    """As `reference.block_rows`; one kernel."""
    b = anchors.shape[0]
    by_row = torch.empty(4, b * width, dtype=torch.int64, device=anchors.device)
    req_slots = torch.empty(b, dtype=torch.int64, device=anchors.device)
    rows = Rows(by_row[0], by_row[1], by_row[2], req_slots, by_row[3])
    _rows_kernel[(b,)](
        anchors,
        seq_lens,
        slots,
        limits,
        drafts,
        *rows[:3],
        req_slots,
        rows.token_slots,
        0 if drafts is None else drafts.stride(0),
        mask_token,
        dummy_slot,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=1,
        **options(chains(anchors.device)),
    )
    return rows


def accept_and_commit(
    drafts: Tensor,
    lengths: Tensor,
    target_tokens: Tensor,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    simulated: Tensor | None,
    num_rounds: Tensor,
    *,
    dummy_slot: int,
    results: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> Tensor:
    """As `reference.accept_and_commit`; one kernel, of one program: it alone counts the round."""
    state = (anchors, seq_lens, slots, limits, packed, simulated, num_rounds)
    return _commit(drafts, lengths, target_tokens, None, *state, dummy_slot, results, stop_ids)


def commit(
    accepted: Accepted,
    lengths: Tensor,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    num_rounds: Tensor,
    *,
    dummy_slot: int,
    results: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> Tensor:
    """As `reference.commit`; the same kernel."""
    tokens, state = accepted.out_tokens, (anchors, seq_lens, slots, limits, packed, None, num_rounds)
    return _commit(tokens[:, :-1], lengths, tokens, accepted.num_accepted, *state, dummy_slot, results, stop_ids)


def _commit(
    drafts: Tensor,
    lengths: Tensor,
    target_tokens: Tensor,
    num_accepted: Tensor | None,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    simulated: Tensor | None,
    num_rounds: Tensor,
    dummy_slot: int,
    results: Tensor | None,
    stop_ids: Tensor | None,
) -> Tensor:
    b, gamma = drafts.shape
    context_slots = torch.empty(b * (gamma + 1), dtype=torch.int64, device=drafts.device)
    _commit_kernel[(1,)](
        drafts,
        lengths,
        target_tokens.contiguous(),
        num_accepted,
        anchors,
        seq_lens,
        slots,
        limits,
        packed,
        simulated,
        num_rounds,
        context_slots,
        results,
        stop_ids,
        b,
        drafts.stride(0),
        packed.stride(0),
        1 if simulated is None else simulated.shape[0],
        0 if simulated is None else simulated.stride(0),
        1 if results is None else results.shape[0],
        0 if results is None else results.stride(0),
        0 if results is None else results.stride(1),
        dummy_slot,
        GAMMA=gamma,
        NUM_STOPS=0 if stop_ids is None else len(stop_ids),
        BLOCK_B=triton.next_power_of_2(b),
        BLOCK_W=triton.next_power_of_2(gamma + 1),
        num_warps=1 if b <= 16 else 4,
        **options(chains(drafts.device)),
    )
    return context_slots
