"""A product of few rows without a loop: a program takes a block of columns and a slice of the sum, and holds its part of the
weight in registers before the rows are there."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.chain import chains, options, wait
from dspark_kernels.linear.reference import Slices


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How the product is cut."""

    cols: int
    """Output columns a program."""
    depth: int
    """Columns of the sum a program: a slice."""
    warps: int = 4


def tile_for(num_cols: int, depth: int, dtype: torch.dtype) -> Tile:
    """Two or more programs a multiprocessor for the projections of published models, and few slices to add up."""
    if dtype == torch.float32:
        return Tile(cols=32, depth=64)
    few = num_cols * depth <= 2048 * 4096  # an output projection: fewer, longer slices, so that its reader is quick
    return Tile(cols=64, depth=512, warps=8) if few and depth % 512 == 0 else Tile(cols=64, depth=256)


@triton.jit(do_not_specialize=["num_rows"])
def _slice_kernel(
    x_ptr,  # [T, K]
    residual_ptr,  # [T, K] or None
    norm_ptr,  # [K] or None
    w_ptr,  # [N, K]
    parts_ptr,  # [S, T, N] float32
    squares_ptr,  # [S, T] float32 or None
    total_ptr,  # [T, K] or None
    num_rows,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    piece = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = piece * DEPTH + tl.arange(0, DEPTH)
    col_ok, k_ok = col < N, k < K
    w_ptrs = w_ptr + col.to(tl.int64)[:, None] * K + k[None, :]
    if N % COLS == 0 and K % DEPTH == 0:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=col_ok[:, None] & k_ok[None, :], other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k_ok, other=0.0).to(tl.float32)
    wait(CHAINED)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    inside = row_ok[:, None] & k_ok[None, :]
    place = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + place * x_stride + k[None, :], mask=inside, other=0.0)
    first = tl.program_id(0) == 0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place * residual_stride + k[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + place * K + k[None, :], x, mask=inside & first)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        tl.store(squares_ptr + piece * num_rows + row, tl.sum(wide * wide, axis=1), mask=row_ok & first)
        x = (wide * norm[None, :]).to(x.dtype)
    y = tl.dot(w, tl.trans(x), input_precision="ieee")  # [COLS, ROWS]: the weight is the tall operand
    at = parts_ptr + (piece * num_rows + row)[None, :].to(tl.int64) * N + col[:, None]
    tl.store(at, y, mask=row_ok[None, :] & col_ok[:, None])


def sliced_linear(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    tile: Tile | None = None,
) -> Slices:
    """As `reference.sliced_linear`; one kernel."""
    (num_rows, depth), num_cols = x.shape, weight.shape[0]
    tile = tile or tile_for(num_cols, depth, x.dtype)
    num_slices = -(-depth // tile.depth)
    rows = max(16, min(64, triton.next_power_of_2(num_rows)))
    parts = torch.empty(num_slices, num_rows, num_cols, dtype=torch.float32, device=x.device)
    squares = None if norm_weight is None else torch.empty(num_slices, num_rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty(num_rows, depth, dtype=x.dtype, device=x.device)
    _slice_kernel[(-(-num_cols // tile.cols), num_slices, -(-num_rows // rows))](
        x,
        residual,
        norm_weight,
        weight,
        parts,
        squares,
        None if residual is None else total,
        num_rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        N=num_cols,
        K=depth,
        ROWS=rows,
        COLS=tile.cols,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        **options(chains(x.device)),
    )
    return Slices(parts, squares, total, eps)


@triton.jit
def add_slices(parts_ptr, places, inside, stride, NUM_SLICES: tl.constexpr):
    """The sum over slices at ``places`` of a slice, float32, in their order; slices lie ``stride`` elements apart."""
    acc = tl.load(parts_ptr + places, mask=inside, other=0.0)
    for s in tl.static_range(1, NUM_SLICES):
        acc += tl.load(parts_ptr + s * stride + places, mask=inside, other=0.0)
    return acc


@triton.jit
def row_scale(squares_ptr, row, num_rows, eps, K: tl.constexpr, NUM_SLICES: tl.constexpr):
    """1 / rms of a row, from its sums of squares in slices."""
    squares = tl.load(squares_ptr + row)
    for s in tl.static_range(1, NUM_SLICES):
        squares += tl.load(squares_ptr + s * num_rows + row)
    return tl.rsqrt(squares / K + eps)
