"""Level of detail: nothing is lost, nothing idle is painted over, and a view is small however many events it looks at."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_lab.view.browse.detail import CELL_PX, Row, look


def row_of(start: np.ndarray, dur: np.ndarray, *, colours: int = 1, hits: np.ndarray | None = None) -> Row:
    order = np.lexsort((-dur, start))
    codes = np.arange(len(start)) % colours
    return Row(start[order], (start + dur)[order], codes, np.arange(len(start)), hits)


def random_row(seed: int, *, n: int = 3000, overlap: bool = False) -> Row:
    rng = np.random.default_rng(seed)
    dur = np.where(rng.random(n) < 0.05, rng.integers(2000, 60_000, n), rng.integers(0, 300, n))
    if overlap:
        return row_of(rng.integers(0, 2_000_000, n), dur, colours=3)
    start = np.cumsum(dur + rng.integers(0, 400, n)) - dur
    return row_of(start, dur, colours=3)


def union(row: Row, lo: int, hi: int) -> int:
    """Covered time by painting each nanosecond: slow, and plain."""
    painted = np.zeros(hi - lo, dtype=bool)
    for a, b in zip(np.clip(row.start, lo, hi), np.clip(row.end, lo, hi), strict=True):
        painted[a - lo : b - lo] = True
    return int(painted.sum())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_event_is_lost(seed: int, overlap: bool) -> None:
    row = random_row(seed, overlap=overlap)
    rng = np.random.default_rng(100 + seed)
    for _ in range(20):
        lo, hi = np.sort(rng.integers(-1000, int(row.reach[-1]) + 1000, 2))
        boxes, _ = look([row], int(lo), int(hi) + 1, pixels=int(rng.integers(50, 1500)))
        inside = (row.start < hi + 1) & (np.maximum(row.end, row.reach) > lo) & (row.end > lo)
        assert boxes.count.sum() >= inside.sum()
        assert set(np.flatnonzero(inside & (row.end - row.start > hi - lo))) <= set(boxes.event.tolist())
        if not overlap:
            assert boxes.count.sum() == inside.sum()


@pytest.mark.parametrize("overlap", [False, True])
def test_covered_time_is_that_of_painting(overlap: bool) -> None:
    row = random_row(7, n=200, overlap=overlap)
    for lo, hi in ((0, 5000), (1234, 60_000), (20_000, 20_001)):
        assert np.diff(row.covered(np.array([lo, hi])))[0] == union(row, lo, hi)


@pytest.mark.parametrize("overlap", [False, True])
def test_share_is_what_is_busy_beside_the_boxes_drawn(overlap: bool) -> None:
    row = random_row(3, overlap=overlap)
    boxes, cell = look([row], 0, int(row.reach[-1]), pixels=300)
    assert boxes.merged.sum() > 50
    own = row_of(boxes.start[~boxes.merged], (boxes.end - boxes.start)[~boxes.merged])
    for i in np.flatnonzero(boxes.merged)[::7]:
        lo, hi = int(boxes.start[i]), int(boxes.end[i])
        assert hi - lo == cell
        big = own.start[(own.start < hi) & (own.end > lo) & (own.end - own.start >= cell)]
        covered, over = union(row, lo, hi), union(_only(row, boxes, cell), lo, hi)
        assert boxes.share[i] == pytest.approx((covered - over) / max(hi - lo - over, 1))
        assert len(big) or over == 0


def _only(row: Row, boxes, cell: int) -> Row:
    """The events of a cell or longer."""
    big = row.end - row.start >= cell
    return Row(row.start[big], row.end[big], row.colour[big], row.name[big])


def test_idle_time_is_not_painted_over() -> None:
    burst = np.arange(1000) * 10
    row = row_of(np.concatenate((burst, burst + 1_000_000)), np.full(2000, 5))
    boxes, cell = look([row], 0, 1_010_000, pixels=300)
    assert boxes.merged.all()
    assert not ((boxes.start < 1_000_000 - cell) & (boxes.end > 10_000 + cell)).any()
    full = boxes.share[(boxes.end <= 10_000) | ((boxes.start >= 1_000_000) & (boxes.end <= 1_010_000))]
    assert full == pytest.approx(0.5, abs=0.01)


def test_an_event_alone_in_its_cell_keeps_its_extent() -> None:
    row = row_of(np.array([0, 100_000, 100_010]), np.array([3, 4, 5]))
    boxes, _ = look([row], 0, 200_000, pixels=300)
    own = ~boxes.merged
    assert boxes.start[own].tolist() == [0]
    assert boxes.end[own].tolist() == [3]
    assert boxes.count[boxes.merged].tolist() == [2]


def test_colour_of_a_merged_box_is_what_covers_most_beside_the_long_ones() -> None:
    start, dur = np.array([0, 10, 20, 30]), np.array([4, 2, 6, 5000])
    row = Row(start, start + dur, np.array([0, 0, 1, 2]), np.arange(4))
    boxes, _ = look([row], 0, 90_000, pixels=300)
    assert boxes.colour[boxes.merged].tolist() == [0]  # 4 + 2 and 6: the first of equals; never the long one's 2
    dur[2] = 7
    row = Row(start, start + dur, np.array([0, 0, 1, 2]), np.arange(4))
    assert look([row], 0, 90_000, pixels=300)[0].colour.tolist() == [1, 2]


def test_cells_stand_still_when_the_view_is_moved() -> None:
    row = random_row(5)
    one, cell = look([row], 50_000, 350_000, pixels=300)
    two, _ = look([row], 50_000 + 7, 350_007, pixels=300)
    assert (one.start[one.merged] % cell == 0).all()
    assert set(two.start[two.merged][1:-1].tolist()) <= set(one.start[one.merged].tolist())


def test_a_million_events_are_a_few_boxes_and_detail_comes_with_the_zoom() -> None:
    rng = np.random.default_rng(1)
    dur = rng.integers(500, 6000, 1_000_000)
    row = row_of(np.cumsum(dur + 300) - dur, dur, colours=3)
    end = int(row.reach[-1])
    far, wide = look([row], 0, end, pixels=1000)
    near, narrow = look([row], end // 2, end // 2 + 100_000, pixels=1000)
    assert far.merged.all()
    assert far.count.sum() == 1_000_000
    assert len(far) <= 1000 / CELL_PX + 2
    assert not near.merged.any()
    assert narrow < wide


def test_the_limit_holds_over_all_rows() -> None:
    rows = [random_row(s) for s in range(8)]
    boxes, cell = look(rows, 0, 600_000, pixels=2000, limit=500)
    assert len(boxes) <= 500
    assert cell > 600_000 * CELL_PX // 2000
    assert set(boxes.row.tolist()) == set(range(8))


def test_without_pixels_nothing_is_merged_within_the_limit() -> None:
    row = random_row(2)
    boxes, cell = look([row], 0, int(row.reach[-1]), pixels=None, limit=len(row))
    assert cell == 0
    assert len(boxes) >= len(row) - 1
    assert look([row], 0, int(row.reach[-1]), pixels=None, limit=300)[0].merged.any()


def test_what_a_search_found_is_counted_in_every_box() -> None:
    plain = random_row(9)
    hits = np.flatnonzero(np.arange(len(plain)) % 13 == 0)
    row = plain.marked(hits)
    for pixels in (50, 400, 4000):
        boxes, _ = look([row], -1, int(row.reach[-1]) + 1, pixels=pixels)
        assert boxes.hit.sum() == len(hits)
    assert look([plain], 0, 10_000, pixels=300)[0].hit.sum() == 0


def test_nothing_to_see() -> None:
    none = row_of(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert len(look([none], 0, 1000, pixels=300)[0]) == 0
    assert len(look([], 0, 1000, pixels=300)[0]) == 0
    assert len(look([random_row(1)], 10**12, 10**12 + 5, pixels=300)[0]) == 0
