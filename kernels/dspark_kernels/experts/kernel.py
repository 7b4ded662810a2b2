"""Grouped SwiGLU experts for decode: few rows an expert, so the weights' bytes are the time.

A pair is one (row, choice) of ``local_ids``, numbered t · k + j. One program takes one expert and some columns, finds the
expert's pairs and streams its weights once for up to ``rows`` of them (more pairs: again, out of the L2). Results are
kept by pair, so nothing is moved into an order and back: gate_up gives ``act`` [P, I], down gives the weighted ``y``
[P, H], and a last kernel adds up k pairs a row. No atomics, no grid that depends on values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = knobs.runtime.interpret
"""Whether these kernels run in Triton's interpreter, which takes CPU tensors."""

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
    warps: int = 4


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut; `tiles_for` has the table."""

    rows: int
    """Pairs of one expert that share one pass over its weights; at least 16, the matrix unit's height."""
    up: Product
    down: Product
    chained: bool = False
    """Programmatic dependent launch: a kernel's programs are set up in its predecessor's tail, and down's weights start
    on their way into the L2 there. The interpreter knows no such thing and leaves it out."""


def tiles_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """By pairs an expert: one tile of 16 rows takes them all up to a mean of 8, with small column tiles, so that even a
    single request's experts give over ten programs a multiprocessor; with more rows wider tiles read ``x`` less often."""
    mean = num_pairs / num_experts
    if dtype == torch.float32:  # exact float32 products, on the plain units
        narrow = Product(cols=16, depth=64, stages=3)
        return Tiles(rows=16, up=narrow, down=narrow)
    if mean <= 8:
        return Tiles(
            rows=16, up=Product(cols=16, depth=128, stages=4), down=Product(cols=32, depth=128, stages=4)
        )  # fmt: skip
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
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
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
    SIZE: tl.constexpr,  # the length of the sum
    DEPTH: tl.constexpr,
    EVEN_COLS: tl.constexpr,
):
    """``acc`` plus rows · weightsᵀ. Masks that would hold everywhere are left out: they would narrow the loads."""
    k = tl.arange(0, DEPTH)[None, :]
    for start in range(0, SIZE, DEPTH):
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


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _gate_up_kernel(
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
    SEARCH: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    lead = tl.program_id(1)
    if counts_ptr is None:
        expert, count, place = _search(ids_ptr, lead, num_pairs, num_experts, BY_PAIR, SEARCH)  # pyright: ignore
    else:
        expert = lead.to(tl.int64)
        count = tl.load(counts_ptr + lead)
    # Gate and up columns side by side, so that both of a pair lie in one thread when the accumulator is split.
    both = tl.arange(0, 2 * COLS)
    w_col = tl.program_id(0) * COLS + both // 2
    w_ptrs = w_ptr + expert * (2 * I * H) + (w_col + (both % 2) * I)[:, None] * H
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    for first in range(0, count, ROWS):
        slot = first + tl.arange(0, ROWS)
        live = slot < count
        if counts_ptr is None:
            pair = _pick(place, slot, SEARCH)
        else:
            pair = tl.load(lists_ptr + lead * num_pairs + slot, mask=live, other=0)
        acc = tl.zeros([ROWS, 2 * COLS], tl.float32)
        x_ptrs = x_ptr + (pair // TOPK)[:, None] * H
        acc = _product(acc, x_ptrs, live, w_ptrs, w_col < I, H, DEPTH, I % COLS == 0)
        gate, up = tl.split(tl.reshape(acc, [ROWS, COLS, 2]))
        act = gate / (1.0 + tl.exp(-gate)) * up
        at = act_ptr + pair[:, None] * I + col[None, :]
        tl.store(at, act.to(act_ptr.dtype.element_ty), mask=live[:, None] & (col < I)[None, :])


@triton.jit
def _prefetch(ptrs, num_bytes):
    """Starts ``num_bytes`` (a multiple of 16) behind each pointer on their way into the L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [ptrs, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _down_kernel(
    act_ptr,  # [P, I]
    ids_ptr,  # [P] int64
    weights_ptr,  # [P] float32
    counts_ptr,  # [E] int32 or None
    lists_ptr,  # [E, P] int32 or None
    w_ptr,  # [E, H, I]
    y_ptr,  # [P, H] float32
    num_pairs,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SEARCH: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHAINED: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of a quarter of a row of I, or 0
):
    # The ids (and lists) are complete when gate_up lets this kernel start: gate_up waited for them first.
    lead = tl.program_id(1)
    if counts_ptr is None:
        expert, count, place = _search(ids_ptr, lead, num_pairs, num_experts, BY_PAIR, SEARCH)  # pyright: ignore
    else:
        expert = lead.to(tl.int64)
        count = tl.load(counts_ptr + lead)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    w_ptrs = w_ptr + expert * (H * I) + col[:, None] * I
    if CHAINED:
        if PREFETCH > 0:  # noqa: SIM102 (decided when compiling, unlike the next)
            if count > 0:
                quarter = (tl.arange(0, 4) * (I // 4))[None, :]
                _prefetch(w_ptrs + quarter, tl.full([COLS, 4], PREFETCH, tl.int32))
        gdc_wait()
        gdc_launch_dependents()
    for first in range(0, count, ROWS):
        slot = first + tl.arange(0, ROWS)
        live = slot < count
        if counts_ptr is None:
            pair = _pick(place, slot, SEARCH)
        else:
            pair = tl.load(lists_ptr + lead * num_pairs + slot, mask=live, other=0)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        acc = _product(acc, act_ptr + pair[:, None] * I, live, w_ptrs, col < H, I, DEPTH, H % COLS == 0)
        weight = tl.load(weights_ptr + pair, mask=live, other=0.0)
        at = y_ptr + pair[:, None] * H + col[None, :]
        tl.store(at, acc * weight[:, None], mask=live[:, None] & (col < H)[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def _combine_kernel(
    y_ptr,  # [T, k, H] float32
    ids_ptr,  # [T, k] int64
    residual_ptr,  # [T, H] or None
    out_ptr,  # [T, H]
    num_experts,
    TOPK: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1)
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
    tiles: Tiles | None = None,
) -> Tensor:
    """As `reference.experts`; three kernels, or four where there are over `SEARCH_PAIRS` pairs."""
    (num_rows, width), topk = x.shape, local_ids.shape[1]
    num_experts, inner = gate_up.shape[0], down.shape[2]
    num_pairs = num_rows * topk
    tiles = tiles or tiles_for(num_pairs, num_experts, x.dtype)
    chained = tiles.chained and not INTERPRETED

    counts = lists = None
    if num_pairs > SEARCH_PAIRS:
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
        lists = torch.empty(num_experts, num_pairs, dtype=torch.int32, device=x.device)
        _list_kernel[(num_experts,)](local_ids, counts, lists, num_pairs, **_launch(chained, BLOCK=LIST_BLOCK))
    by_pair = counts is None and num_pairs < num_experts
    leads = num_pairs if by_pair else num_experts
    search = max(16, triton.next_power_of_2(num_pairs)) if counts is None else 1
    shared = {"H": width, "I": inner, "ROWS": tiles.rows, "SEARCH": search, "BY_PAIR": by_pair}

    act = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(-(-inner // tiles.up.cols), leads)](
        x, local_ids, counts, lists, gate_up, act, num_pairs, num_experts,
        **shared, **_cut(tiles.up), **_launch(chained, tiles.up.warps, TOPK=topk),
    )  # fmt: skip
    y = torch.empty(num_pairs, width, dtype=torch.float32, device=x.device)
    quarter = _quarter_bytes(width, inner, tiles.down.cols, down.element_size())
    _down_kernel[(-(-width // tiles.down.cols), leads)](
        act, local_ids, topk_weights, counts, lists, down, y, num_pairs, num_experts,
        **shared, **_cut(tiles.down), **_launch(chained, tiles.down.warps, PREFETCH=quarter),
    )  # fmt: skip
    out = torch.empty_like(x)
    _combine_kernel[(-(-width // 256), num_rows)](
        y, local_ids, residual, out, num_experts, **_launch(chained, 2, TOPK=topk, H=width, COLS=256)
    )
    return out


def _cut(product: Product) -> dict[str, Any]:
    return {"COLS": product.cols, "DEPTH": product.depth, "num_stages": product.stages}


def _launch(chained: bool, warps: int = 4, **constants: int) -> dict[str, Any]:
    options: dict[str, Any] = {"CHAINED": chained, "num_warps": warps, **constants}
    return options | {"launch_pdl": True} if chained else options


def _quarter_bytes(width: int, inner: int, cols: int, item_bytes: int) -> int:
    """Bytes of a quarter of a row of I; 0 where quarters are no whole 16 bytes or a tile would reach over the end."""
    return inner * item_bytes // 4 if inner * item_bytes % 64 == 0 and width % cols == 0 else 0
