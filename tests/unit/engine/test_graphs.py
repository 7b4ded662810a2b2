"""`GraphRunner` without a GPU: buckets, padding, admission, the scalar's slot, and each check caught failing on a planted fault.

The backend here calls the function again at replay; tests/gpu/test_graphs.py runs the same faults on real graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_lab.engine.graphs import Checks, GraphKey, GraphRunner, StaticInput
from dspark_lab.errors import LabError

CPU = torch.device("cpu")


def runner(
    fn: Any = lambda x: x * 2, *, buckets: tuple[int, ...] = (1, 2, 4), pad: float | None = 0.0, **options: Any
) -> GraphRunner:
    r = GraphRunner(fn, {"x": StaticInput(buffer=torch.zeros(4, 3), pad=pad)}, buckets=buckets, device=CPU, **options)
    r.capture()
    return r


def test_the_smallest_bucket_that_holds_the_batch() -> None:
    r = runner()
    out = r.replay(3, x=torch.ones(3, 3))
    assert out.shape == (4, 3)
    assert out[:3].eq(2).all()
    assert out[3].eq(0).all()
    assert [g["num_replays"] for g in r.report()] == [1, 0, 0]
    assert [g["slots"] for g in r.report()] == [4, 2, 1]  # captured large to small


def test_keys_hold_tokens_slots_and_width() -> None:
    assert runner(width=6).key(4) == GraphKey(tokens=24, slots=4, width=6)


@pytest.mark.parametrize(
    ("slots", "width", "why"),
    [
        (5, None, "5 slots are over the largest bucket, 4"),
        (2, 5, "width 5 differs from the captured 1"),
        (0, None, "no slots"),
    ],
)
def test_each_eager_fallback_has_a_reason_and_is_counted(slots: int, width: int | None, why: str) -> None:
    r = runner()
    out = r.run(slots, width=width, x=torch.ones(max(slots, 1), 3))
    assert out.eq(2).all()
    assert r.fallbacks == {why: 1}


def test_not_captured_is_a_reason_too() -> None:
    r = GraphRunner(lambda x: x, {"x": StaticInput(buffer=torch.zeros(4, 3))}, buckets=(4,), device=CPU)
    r.run(1, x=torch.ones(1, 3))
    assert r.fallbacks == {"not captured": 1}


def test_warm_ups_and_capture_leave_inputs_and_state_as_they_were() -> None:
    count, buffer = torch.zeros(1), torch.full((4, 3), 7.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + count

    r = GraphRunner(fn, {"x": StaticInput(buffer=buffer)}, buckets=(2, 4), device=CPU, state=lambda: {"count": count})
    r.capture()
    assert count.item() == 0
    assert buffer.eq(7.0).all()
    r.replay(2)
    assert count.item() == 1


def test_capture_comes_after_a_synchronise_and_a_barrier() -> None:
    order: list[str] = []

    class Watched:
        def warm_up(self, fn: Any) -> None:
            order.append("warm")
            fn()

        def capture(self, fn: Any) -> Any:
            order.append("capture")
            return (lambda: None), fn(), (lambda: None)

        def synchronize(self) -> None:
            order.append("sync")

        def memory(self) -> int:
            return 0

        def release(self) -> None: ...

    runner(buckets=(4,), backend=Watched(), barrier=lambda: order.append("barrier"))
    assert order[:5] == ["warm", "warm", "sync", "barrier", "capture"]


# -- the scalar's slot ---------------------------------------------------------------------------------------------


def masked(x: torch.Tensor, num_token_non_padded: torch.Tensor | None = None) -> torch.Tensor:
    if num_token_non_padded is None:
        return x.clone()
    return torch.where(torch.arange(x.shape[0])[:, None] < num_token_non_padded, x, 0.0)


def test_the_slot_is_filled_on_every_replay() -> None:
    r = runner(masked, predicate=lambda: True)
    ones = torch.ones(4, 3)
    assert r.replay(4, x=ones, num_token_non_padded=4).sum() == 12
    assert r.replay(4, x=ones, num_token_non_padded=torch.tensor(1, dtype=torch.int32)).sum() == 3
    assert r.replay(4, x=ones, num_token_non_padded=3).sum() == 9


def test_captured_with_a_slot_and_replayed_with_none() -> None:
    with pytest.raises(LabError, match="captured with a slot for num_token_non_padded and is replayed with None"):
        runner(masked, predicate=lambda: True).replay(2)


def test_captured_with_none_and_replayed_with_a_tensor() -> None:
    with pytest.raises(LabError, match="captured with num_token_non_padded=None and is replayed with a value"):
        runner(masked).replay(2, num_token_non_padded=torch.tensor(2, dtype=torch.int32))


def test_a_predicate_that_flips_in_between() -> None:
    now = [True]
    r = runner(masked, predicate=lambda: now[0])
    now[0] = False
    with pytest.raises(LabError, match="the predicate is False now and was True at capture"):
        r.replay(2, num_token_non_padded=2)


def test_a_wrong_scalar_is_named() -> None:
    with pytest.raises(LabError, match="one int32 element"):
        runner(masked, predicate=lambda: True).replay(2, num_token_non_padded=torch.tensor([1, 2]))


# -- checks, each on a planted fault -------------------------------------------------------------------------------


def test_a_rebound_buffer_is_caught() -> None:
    cache = {"k": torch.zeros(3)}
    r = runner(lambda x: x + cache["k"], watch=lambda: {"k cache": cache["k"]}, checks=Checks(addresses=True))
    r.replay(1)
    cache["k"] = torch.ones(3)
    with pytest.raises(LabError, match="rebound buffer: 'k cache'"):
        r.replay(1)


def test_padding_that_is_left_out_shows_as_poison() -> None:
    mean = runner(lambda x: x.mean(0, keepdim=True), pad=None, checks=Checks(poison=True))
    assert mean.replay(3, x=torch.ones(3, 3)).isnan().all()
    filled = runner(lambda x: x.sum(0, keepdim=True), checks=Checks(poison=True))
    assert filled.replay(3, x=torch.ones(3, 3)).eq(3).all()


def test_a_replay_that_differs_from_eager_is_caught() -> None:
    branch = [1.0]
    r = runner(lambda x: x * branch[0], checks=Checks(eager=True))
    r.replay(2, x=torch.ones(2, 3))
    r.replay(2, x=torch.full((2, 3), 5.0))
    captured = r.graphs[r.key(2)]
    captured.replay = lambda: captured.outputs.fill_(99.0)  # what a stale graph would give
    with pytest.raises(LabError, match="differs from eager on the same inputs"):
        r.replay(2, x=torch.ones(2, 3))


def test_shapes_and_names_of_inputs_are_checked() -> None:
    r = runner()
    with pytest.raises(LabError, match=r"x has shape \(2, 3\) and must have \(3, 3\)"):
        r.replay(3, x=torch.ones(2, 3))
    with pytest.raises(LabError, match="no input 'y'"):
        r.replay(3, y=torch.ones(3, 3))
    with pytest.raises(LabError, match="4 rows and the largest bucket needs 8"):
        GraphRunner(lambda x: x, {"x": StaticInput(buffer=torch.zeros(4, 3))}, buckets=(8,), device=CPU)


def test_destroy_and_capture_again() -> None:
    r = runner()
    with pytest.raises(LabError, match="captured already"):
        r.capture()
    r.destroy()
    assert r.report() == []
    r.capture()
    assert len(r.report()) == 3
