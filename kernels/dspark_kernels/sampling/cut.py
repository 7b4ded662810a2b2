"""Top-k and top-p without a sort: the least logit that is kept is found bit by bit, one program a row."""

# Launch options and constexpr arguments are not in a kernel's own signature.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.chain import wait
from dspark_kernels.sampling.rows import MANY, finite, logits_at, row_of, scale_of


@triton.jit
def _key(x):
    """Integers in the order of float32."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(logits, least_key, top, scale, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """How many logits of a row have at least ``least_key`` (``COUNT``), or their mass."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = logits_at(logits, v, v < V)
        held = (_key(x) >= least_key) & (v < V)
        total += tl.where(held, 1.0 if COUNT else tl.exp((x - top) * scale), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _search(
    logits, wanted, top, scale, V: tl.constexpr, BLOCK: tl.constexpr, FIRST_BIT: tl.constexpr, LAST_BIT: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """The largest key with at least ``wanted`` logits, or mass, at and above it; bit by bit from the sign down."""
    floor = tl.full([], -2147483648, tl.int32)
    key = floor
    for i in range(FIRST_BIT - LAST_BIT + 1):
        bit = FIRST_BIT - i
        # The first bit is the sign: with it set the keys from 0 on, without the negative ones.
        higher = tl.where(bit == 31, 0, key | (1 << (bit % 31))).to(tl.int32)
        enough = _weigh(logits, higher, top, scale, V, BLOCK, COUNT) >= wanted
        key = tl.where(enough, higher, key)
    if LAST_BIT > 0:  # keys of negative logits have ones where those of positive ones have zeros
        key = tl.where((key < 0) & (key != floor), key | ((1 << LAST_BIT) - 1), key)
    return key


@triton.jit
def _nth_equal(logits, key, n, V: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the ``n``-th (from 1) logit of a row that has this ``key``."""
    seen = tl.zeros([], tl.int32)
    last = tl.full([], V - 1, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = logits_at(logits, v, v < V)
        equal = ((_key(x) == key) & (v < V)).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0)
        found = tl.min(tl.where((equal > 0) & (rank == n), v, MANY), axis=0)
        last = tl.where(found < V, found, last)
        seen += tl.sum(equal, axis=0)
    return last


@triton.jit
def cut_kernel(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    top_k_ptr,
    top_p_ptr,
    rows_ptr,
    maxima_ptr,
    masses_ptr,
    firsts_ptr,
    least_ptr,
    last_ptr,
    logits_stride,
    num_rows,
    W: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST_BIT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """What of a row is kept, and the mass of each of its tiles under that; maxima and firsts become the row's."""
    wait(CHAINED)
    place = tl.program_id(0)
    request = place // W
    row, known = row_of(place, rows_ptr, num_rows)
    scale, is_greedy = scale_of(request, temperature_ptr, greedy_ptr)
    logits = logits_ptr + row * logits_stride
    p = tl.arange(0, BLOCK_P)
    maxima = tl.load(maxima_ptr + place * P + p, mask=p < P, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    firsts = tl.load(firsts_ptr + place * P + p, mask=p < P, other=MANY)
    first = tl.min(tl.where(maxima == top, firsts, MANY), axis=0)
    known = known & (top != float("-inf"))
    top = finite(top)
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    key = tl.full([], -2147483648, tl.int32)
    last = tl.full([], V - 1, tl.int32)
    cuts_k = known & (is_greedy == 0) & (top_k < V)
    cuts_p = known & (is_greedy == 0) & (top_p < 1.0)
    if cuts_k | cuts_p:
        if cuts_k:
            wanted = top_k.to(tl.float32)
            key = _search(logits, wanted, top, scale, V, BLOCK, 31, LAST_BIT, True)
            above = _weigh(logits, key + 1, top, scale, V, BLOCK, True)
            last = _nth_equal(logits, key, (wanted - above).to(tl.int32), V, BLOCK)
        if cuts_p:
            kept_mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                x = logits_at(logits, v, v < V)
                held = (v < V) & ((_key(x) > key) | ((_key(x) == key) & (v <= last)))
                kept_mass += tl.where(held, tl.exp((x - top) * scale), 0.0)
            wanted = top_p * tl.sum(kept_mass, axis=0)
            nucleus = _search(logits, wanted, top, scale, V, BLOCK, 31, LAST_BIT, False)
            deeper = nucleus <= key  # within the tie that top-k cut, whose members are fewer than a search sees
            nucleus = tl.maximum(nucleus, key)
            above = _weigh(logits, nucleus + 1, top, scale, V, BLOCK, False)
            each = tl.exp((_value(nucleus) - top) * scale)
            num = tl.maximum(tl.ceil((wanted - above) / each), 1.0)
            num = tl.minimum(num, V * 1.0).to(tl.int32)
            nth = _nth_equal(logits, nucleus, num, V, BLOCK)
            last = tl.where(deeper, tl.minimum(last, nth), nth)
            key = nucleus
    least = tl.where(key == -2147483648, float("-inf"), _value(key))
    tl.store(least_ptr + place, least)
    tl.store(last_ptr + place, last)
    PARTS: tl.constexpr = BLOCK // TILE_V
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = logits_at(logits, v, (v < V) & known)
        held = (v < V) & ((x > least) | ((x == least) & (v <= last)))
        kept = tl.where(held, tl.exp((x - top) * scale), 0.0)
        part = start // TILE_V + tl.arange(0, PARTS)
        tl.store(masses_ptr + place * P + part, tl.sum(tl.reshape(kept, [PARTS, TILE_V]), axis=1), mask=part < P)
    tl.store(maxima_ptr + place * P + p, tl.zeros([BLOCK_P], tl.float32) + top, mask=p < P)
    tl.store(firsts_ptr + place * P + p, tl.zeros([BLOCK_P], tl.int32) + tl.minimum(first, V - 1), mask=p < P)
