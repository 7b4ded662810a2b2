"""What describes a row of logits without a copy of it: a few numbers a tile, and what a cut leaves.

A row's vocabulary is cut into tiles, each a program of its own. What is kept of a row that is cut is always a prefix of the order by
(logit, id), so that the least logit and the last id among its equals say it all.
"""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import wait

MANY: tl.constexpr = tl.constexpr(2147483647)


class Described(NamedTuple):
    """Rows as the kernels know them; N rows, P tiles."""

    maxima: Tensor
    """[N, P] float32."""
    masses: Tensor
    """[N, P] float32: sum of exp((x − maximum) / temperature) over what is kept of the tile."""
    firsts: Tensor
    """[N, P] int32: the tile's first maximum."""
    least: Tensor | None
    """[N] float32: the least logit kept; None where no row is cut."""
    last: Tensor | None
    """[N] int32: the last id kept among logits that equal it."""


@triton.jit
def row_of(place, rows_ptr, num_rows):
    """The row of logits of ``place``, and whether it has one."""
    if rows_ptr is None:
        row = place
    else:
        row = tl.load(rows_ptr + place)
    known = row < num_rows
    return tl.where(known, row, 0).to(tl.int64), known


@triton.jit
def logits_at(at, v, inside):
    """Float32 logits ``v`` of the row that begins at ``at``; −inf outside, and where a padded row holds NaN."""
    x = tl.load(at + v, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def finite(top):
    """0 for a row, or tile, that holds nothing finite, so that no difference of infinities is taken."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def scale_of(request, temperature_ptr, greedy_ptr):
    """1 / temperature; 1 for greedy rows, which have none."""
    is_greedy = tl.load(greedy_ptr + request) != 0
    return 1.0 / tl.where(is_greedy, 1.0, tl.load(temperature_ptr + request)), is_greedy


@triton.jit
def describe_kernel(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    rows_ptr,
    maxima_ptr,
    masses_ptr,
    firsts_ptr,
    logits_stride,
    num_rows,
    W: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    TILE_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait(CHAINED)
    place, tile = tl.program_id(0), tl.program_id(1)
    row, known = row_of(place, rows_ptr, num_rows)
    scale, _ = scale_of(place // W, temperature_ptr, greedy_ptr)
    v = tile * TILE_V + tl.arange(0, TILE_V)
    x = logits_at(logits_ptr + row * logits_stride, v, known & (v < V))
    top = tl.max(x, axis=0)
    first = tl.min(tl.where(x == top, v, MANY), axis=0)
    at = place * P + tile
    tl.store(maxima_ptr + at, top)
    tl.store(masses_ptr + at, tl.sum(tl.exp((x - finite(top)) * scale), axis=0))
    tl.store(firsts_ptr + at, tl.minimum(first, V - 1))


@triton.jit
def kept_by(x, v, place, least_ptr, last_ptr):
    """Which logits ``x`` of ids ``v`` a cut leaves; all without one."""
    if least_ptr is None:
        return x == x
    else:
        least = tl.load(least_ptr + place)
        return (x > least) | ((x == least) & (v <= tl.load(last_ptr + place)))


@triton.jit
def tiles_of(place, scale, maxima_ptr, masses_ptr, firsts_ptr, V: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A row's maximum, masses of its tiles relative to it, their sum, and its first maximum."""
    p = tl.arange(0, BLOCK_P)
    at = place * P + p
    maxima = tl.load(maxima_ptr + at, mask=p < P, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    firsts = tl.load(firsts_ptr + at, mask=p < P, other=MANY)
    best = tl.min(tl.where(maxima == top, firsts, MANY), axis=0)
    top = finite(top)
    masses = tl.load(masses_ptr + at, mask=p < P, other=0.0) * tl.exp((maxima - top) * scale)
    return top, masses, tl.maximum(tl.sum(masses, axis=0), 1e-30), tl.minimum(best, V - 1)


@triton.jit
def choose(masses, noise, BLOCK_P: tl.constexpr):
    """The tile that ``noise`` falls into, and how far into it."""
    p = tl.arange(0, BLOCK_P)
    ends = tl.cumsum(masses.to(tl.float64), axis=0)
    goal = noise * tl.max(ends, axis=0)
    last = tl.max(tl.where(masses > 0, p, 0), axis=0)
    tile = tl.minimum(tl.sum((ends <= goal).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(p == tile, ends - masses.to(tl.float64), 0.0), axis=0)
    return tile, (goal - before).to(tl.float32)


@triton.jit
def within(weights, v, goal, V: tl.constexpr):
    """The first id whose cumulative weight is over ``goal``; the last with weight where rounding leaves none."""
    has = weights > 0
    passed = has & (tl.cumsum(weights, axis=0) > goal)
    first = tl.min(tl.where(passed, v, MANY), axis=0)
    last = tl.max(tl.where(has, v, 0), axis=0)
    return tl.minimum(tl.where(first == MANY, last, first), V - 1).to(tl.int64)
