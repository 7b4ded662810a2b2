"""Grouped SwiGLU experts for decode: few rows an expert, so the weights' bytes are the time.

A pair is one (row, choice) of ``local_ids``, numbered t · k + j. One program takes one expert and some columns, finds the
expert's pairs and streams its weights once for up to ``rows`` of them (more pairs: again, out of the L2). Results are
kept by pair, so nothing is moved into an order and back: gate_up gives ``act`` [P, I], down gives the weighted ``y``
[P, H], and a last kernel adds up k pairs a row. No sum by atomics, no grid that depends on values.

Both products are one kernel: programs of down begin where those of gate_up run out, and wait for their expert's activation
only (a counter an expert), so that memory is never idle between the two.
"""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait

__all__ = ["Product", "Tiles", "experts", "tiles_for"]

SEARCH_PAIRS = 256
"""Up to here each program looks its pairs up among all of them; beyond, one small kernel lists them by expert."""

LIST_BLOCK = 1024
"""Pairs that kernel looks at in one go."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """How one of the two products is cut."""

    cols: int
    """Output columns a program (in gate_up: of gate and of up, each)."""
    depth: int
    """Columns of the sum a pipeline stage."""
    stages: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut; `tiles_for` has the table."""

    rows: int
    """Pairs of one expert that share one pass over its weights; at least 16, the matrix unit's height."""
    up: Product
    down: Product
    warps: int = 4
    chained: bool = True
    """Whether the kernels are chained where the device can: see `dspark_kernels.chain`."""


def tiles_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """By pairs an expert: one tile of 16 rows takes them all up to a mean of 8, with small column tiles, so that even a
    single request's experts give over ten programs a multiprocessor; with more rows wider tiles read ``x`` less often."""
    mean = num_pairs / num_experts
    if dtype == torch.float32:  # exact float32 products, on the plain units
        narrow = Product(cols=16, depth=64, stages=3)
        return Tiles(rows=16, up=narrow, down=narrow)
    if mean <= 8:
        up, down = Product(cols=32, depth=128, stages=3), Product(cols=64, depth=128, stages=3)
        return Tiles(rows=16, up=up, down=down)
    rows = 32 if mean <= 24 else 64
    return Tiles(rows=rows, up=Product(cols=32, depth=64, stages=4), down=Product(cols=64, depth=64, stages=4))


@triton.jit(do_not_specialize=["num_pairs"])
def _list_kernel(
    ids_ptr,  # [P] int64
    counts_ptr,  # [E] int32: pairs of each expert
    lists_ptr,  # [E, P] int32: which
    num_pairs,
    CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait(CHAINED)
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(lists_ptr + expert * num_pairs + place, pair, mask=mine)
        count += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def _search(ids_ptr, lead, num_pairs, num_experts, BY_PAIR: tl.constexpr, SEARCH: tl.constexpr):
    """This program's expert, its number of pairs (0: nothing to do), and for each pair its place among them or −1.

    BY_PAIR: ``lead`` is a pair, and the first pair of an expert does the work for all; else ``lead`` is the expert.
    """
    pair = tl.arange(0, SEARCH)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    if BY_PAIR:
        expert = tl.load(ids_ptr + lead)
        mine = (ids == expert) & (expert >= 0) & (expert < num_experts)
        works = tl.min(tl.where(mine, pair, SEARCH), axis=0) == lead
    else:
        expert = lead.to(tl.int64)
        mine = ids == expert
        works = True
    count = tl.where(works, tl.sum(mine.to(tl.int32), axis=0), 0)
    place = tl.where(mine, tl.cumsum(mine.to(tl.int32), axis=0) - 1, -1)
    return expert, count, place


@triton.jit
def _pick(place, slot, SEARCH: tl.constexpr):
    """The pairs at the places ``slot`` [ROWS]; 0 where there is none."""
    pair = tl.arange(0, SEARCH)
    return tl.sum(tl.where(place[None, :] == slot[:, None], pair[None, :], 0), axis=1)


@triton.jit
def _product(
    acc,  # [ROWS, COLS] float32
    a_ptrs,  # [ROWS, 1]: the rows
    a_ok,  # [ROWS]
    w_ptrs,  # [COLS, 1]: the weights' rows
    w_ok,  # [COLS]
    FIRST: tl.constexpr,  # where the sum begins
    SIZE: tl.constexpr,  # and ends
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_COLS: tl.constexpr,
):
    """``acc`` plus rows · weightsᵀ. Masks that would hold everywhere are left out: they would narrow the loads."""
    k = tl.arange(0, DEPTH)[None, :]
    for start in tl.range(FIRST, SIZE, DEPTH, num_stages=STAGES):
        if SIZE % DEPTH == 0:
            a = tl.load(a_ptrs + start + k, mask=a_ok[:, None], other=0.0)
            if EVEN_COLS:
                w = tl.load(w_ptrs + start + k)
            else:
                w = tl.load(w_ptrs + start + k, mask=w_ok[:, None], other=0.0)
        else:
            k_ok = start + k < SIZE
            a = tl.load(a_ptrs + start + k, mask=a_ok[:, None] & k_ok, other=0.0)
            w = tl.load(w_ptrs + start + k, mask=w_ok[:, None] & k_ok, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _find(ids_ptr, counts_ptr, lead, num_pairs, num_experts, BY_PAIR: tl.constexpr, SEARCH: tl.constexpr):
    """`_search`, or where pairs are listed what the list says (no places then)."""
    if counts_ptr is None:
        expert, count, place = _search(ids_ptr, lead, num_pairs, num_experts, BY_PAIR, SEARCH)
    else:
        expert = lead.to(tl.int64)
        count = tl.load(counts_ptr + lead)
        place = tl.zeros([SEARCH], tl.int32)
    return expert, count, place


@triton.jit
def _pairs(place, slot, live, lists_ptr, lead, num_pairs, SEARCH: tl.constexpr):
    """The pairs at the places ``slot`` [ROWS] of this lead."""
    if lists_ptr is None:
        pair = _pick(place, slot, SEARCH)
    else:
        pair = tl.load(lists_ptr + lead * num_pairs + slot, mask=live, other=0)
    return pair


@triton.jit
def _gate_up(
    block,  # of columns
    lead,
    x_ptr,  # [T, H]
    ids_ptr,  # [P] int64
    counts_ptr,  # [E] int32 or None
    lists_ptr,  # [E, P] int32 or None
    w_ptr,  # [E, 2I, H]
    act_ptr,  # [P, I]
    num_pairs,
    num_experts,
    TOPK: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SEARCH: tl.constexpr,
    BY_PAIR: tl.constexpr,
):
    """A block of columns of the activation of one lead's pairs."""
    expert, count, place = _find(ids_ptr, counts_ptr, lead, num_pairs, num_experts, BY_PAIR, SEARCH)
    # Gate and up columns side by side, so that both of a pair lie in one thread when the accumulator is split.
    both = tl.arange(0, 2 * COLS)
    w_col = block * COLS + both // 2
    w_ptrs = w_ptr + expert * (2 * I * H) + (w_col + (both % 2) * I)[:, None] * H
    col = block * COLS + tl.arange(0, COLS)
    for first in range(0, count, ROWS):
        slot = first + tl.arange(0, ROWS)
        live = slot < count
        pair = _pairs(place, slot, live, lists_ptr, lead, num_pairs, SEARCH)
        acc = tl.zeros([ROWS, 2 * COLS], tl.float32)
        x_ptrs = x_ptr + (pair // TOPK)[:, None] * H
        acc = _product(acc, x_ptrs, live, w_ptrs, w_col < I, 0, H, DEPTH, STAGES, I % COLS == 0)
        gate, up = tl.split(tl.reshape(acc, [ROWS, COLS, 2]))
        act = gate / (1.0 + tl.exp(-gate)) * up
        at = act_ptr + pair[:, None] * I + col[None, :]
        tl.store(at, act.to(act_ptr.dtype.element_ty), mask=live[:, None] & (col < I)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_leads"])
def _experts_kernel(
    x_ptr,  # [T, H]
    ids_ptr,  # [P] int64
    weights_ptr,  # [P] float32
    counts_ptr,  # [E] int32 or None
    lists_ptr,  # [E, P] int32 or None
    gate_up_ptr,  # [E, 2I, H]
    down_ptr,  # [E, H, I]
    act_ptr,  # [P, I]
    y_ptr,  # [P, H] float32
    arrivals_ptr,  # [leads] int32: blocks of the activation that are complete
    num_pairs,
    num_experts,
    num_leads,
    TOPK: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    UP_COLS: tl.constexpr,
    UP_DEPTH: tl.constexpr,
    UP_STAGES: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SEARCH: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    UP_BLOCKS: tl.constexpr = (I + UP_COLS - 1) // UP_COLS
    DOWN_BLOCKS: tl.constexpr = (H + COLS - 1) // COLS
    program = tl.program_id(0)
    if program < num_leads * UP_BLOCKS:
        lead = program // UP_BLOCKS
        _gate_up(
            program % UP_BLOCKS, lead, x_ptr, ids_ptr, counts_ptr, lists_ptr, gate_up_ptr, act_ptr, num_pairs, num_experts,
            TOPK, H, I, ROWS, UP_COLS, UP_DEPTH, UP_STAGES, SEARCH, BY_PAIR,
        )  # fmt: skip
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        tl.atomic_add(arrivals_ptr + lead, 1, sem="release", scope="gpu")
    else:
        place_in_down = program - num_leads * UP_BLOCKS
        _down(
            place_in_down % DOWN_BLOCKS, place_in_down // DOWN_BLOCKS, act_ptr, ids_ptr, weights_ptr, counts_ptr, lists_ptr,
            down_ptr, y_ptr, arrivals_ptr, num_pairs, num_experts, UP_BLOCKS, H, I, ROWS, COLS, DEPTH, STAGES, SEARCH, BY_PAIR,
        )  # fmt: skip


@triton.jit
def _down(
    block,  # of columns
    lead,
    act_ptr,  # [P, I]
    ids_ptr,  # [P] int64
    weights_ptr,  # [P] float32
    counts_ptr,  # [E] int32 or None
    lists_ptr,  # [E, P] int32 or None
    w_ptr,  # [E, H, I]
    y_ptr,  # [P, H] float32
    arrivals_ptr,  # [leads] int32
    num_pairs,
    num_experts,
    UP_BLOCKS: tl.constexpr,  # arrivals that make a lead's activation complete
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SEARCH: tl.constexpr,
    BY_PAIR: tl.constexpr,
):
    """A block of columns of one lead's weighted outputs, as soon as its activation is complete.

    Programs begin in the order of their numbers, and those that are waited for have lower ones and wait for nobody.
    """
    expert, count, place = _find(ids_ptr, counts_ptr, lead, num_pairs, num_experts, BY_PAIR, SEARCH)
    col = block * COLS + tl.arange(0, COLS)
    w_ptrs = w_ptr + expert * (H * I) + col[:, None] * I
    k = tl.arange(0, DEPTH)[None, :]
    AHEAD: tl.constexpr = I % DEPTH == 0 and H % COLS == 0
    if AHEAD:  # the first tile of the weights, meanwhile
        w = tl.load(w_ptrs + k, mask=(col < H)[:, None] & (count > 0), other=0.0)
    if count > 0:
        arrived = tl.atomic_add(arrivals_ptr + lead, 0, sem="acquire", scope="gpu")
        while arrived < UP_BLOCKS:
            arrived = tl.atomic_add(arrivals_ptr + lead, 0, sem="acquire", scope="gpu")
    for first in range(0, count, ROWS):
        slot = first + tl.arange(0, ROWS)
        live = slot < count
        pair = _pairs(place, slot, live, lists_ptr, lead, num_pairs, SEARCH)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        act_ptrs = act_ptr + pair[:, None] * I
        if AHEAD:
            act = tl.load(act_ptrs + k, mask=live[:, None], other=0.0)
            acc = tl.dot(act, tl.trans(w), acc, input_precision="ieee")
            acc = _product(acc, act_ptrs, live, w_ptrs, col < H, DEPTH, I, DEPTH, STAGES, True)
        else:
            acc = _product(acc, act_ptrs, live, w_ptrs, col < H, 0, I, DEPTH, STAGES, H % COLS == 0)
        weight = tl.load(weights_ptr + pair, mask=live, other=0.0)
        at = y_ptr + pair[:, None] * H + col[None, :]
        tl.store(at, acc * weight[:, None], mask=live[:, None] & (col < H)[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def _combine_kernel(
    y_ptr,  # [T, k, H] float32
    ids_ptr,  # [T, k] int64
    residual_ptr,  # [T, H] or None
    out_ptr,  # [T, H]
    arrivals_ptr,  # [E] int32: set back to 0 for the next call
    num_experts,
    TOPK: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    row = tl.program_id(1)
    lead = tl.arange(0, BLOCK_E)
    tl.store(arrivals_ptr + lead, 0, mask=(lead < num_experts) & (row == 0) & (tl.program_id(0) == 0))
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    acc = tl.zeros([COLS], tl.float32)
    for j in tl.static_range(TOPK):
        pair = row * TOPK + j
        expert = tl.load(ids_ptr + pair)
        kept = (expert >= 0) & (expert < num_experts)
        # Nobody wrote the pairs that were dropped: they are not read.
        acc += tl.load(y_ptr + pair.to(tl.int64) * H + col, mask=kept & (col < H), other=0.0)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + row * H + col, mask=col < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + col, acc.to(out_ptr.dtype.element_ty), mask=col < H)


def experts(
    x: Tensor,
    local_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    residual: Tensor | None = None,
    arrivals: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As `reference.experts`; two kernels, or three where there are over `SEARCH_PAIRS` pairs."""
    (num_rows, width), topk = x.shape, local_ids.shape[1]
    num_experts, inner = gate_up.shape[0], down.shape[2]
    num_pairs = num_rows * topk
    tiles = tiles or tiles_for(num_pairs, num_experts, x.dtype)
    chain = options(tiles.chained and chains(x.device))
    if arrivals is None:
        arrivals = torch.zeros(num_experts, dtype=torch.int32, device=x.device)

    counts = lists = None
    if num_pairs > SEARCH_PAIRS:
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
        lists = torch.empty(num_experts, num_pairs, dtype=torch.int32, device=x.device)
        _list_kernel[(num_experts,)](local_ids, counts, lists, num_pairs, BLOCK=LIST_BLOCK, **chain)
    by_pair = counts is None and num_pairs < num_experts
    leads = num_pairs if by_pair else num_experts
    search = max(16, triton.next_power_of_2(num_pairs)) if counts is None else 1

    act = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(num_pairs, width, dtype=torch.float32, device=x.device)
    up, dn = tiles.up, tiles.down
    _experts_kernel[(leads * (-(-inner // up.cols) + -(-width // dn.cols)),)](
        x, local_ids, topk_weights, counts, lists, gate_up, down, act, y, arrivals, num_pairs, num_experts, leads,
        TOPK=topk, H=width, I=inner, ROWS=tiles.rows, SEARCH=search, BY_PAIR=by_pair,
        UP_COLS=up.cols, UP_DEPTH=up.depth, UP_STAGES=up.stages, COLS=dn.cols, DEPTH=dn.depth, STAGES=dn.stages,
        num_warps=tiles.warps, **chain,
    )  # fmt: skip
    out = torch.empty_like(x)
    _combine_kernel[(-(-width // 256), num_rows)](
        y, local_ids, residual, out, arrivals, num_experts,
        TOPK=topk, H=width, COLS=256, BLOCK_E=triton.next_power_of_2(num_experts), num_warps=2, **chain,
    )  # fmt: skip
    return out
