"""`num_token_non_padded`: both sides of the switch. Where the predicate is false nobody may read the device scalar (poison
proves it); where it is true every path that builds a batch sets it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dspark_lab.config import LabConfig, ParallelConfig, preset
from dspark_lab.engine.alloc import RING, ScalarSource, make_num_token_non_padded
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.request import Request
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardBatch
from dspark_lab.models.weights import build_pair

CPU = torch.device("cpu")
EP1, EP2 = ParallelConfig(), ParallelConfig(ep_size=2)


class Poison(torch.Tensor):
    """One int32 that may be passed on and asked for its shape, and raises where anything reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise AssertionError(f"the device scalar was read by {func}")


def poison() -> torch.Tensor:
    return torch.tensor(5, dtype=torch.int32).as_subclass(Poison)


def engine(cfg: LabConfig, *, ep_rank: int = 0) -> DecodeEngine:
    """An engine of one EP rank in this process; the all-reduce is the rank's own share."""
    group = ExpertGroup(
        parallel=cfg.parallel, ep_rank=ep_rank, mask_padding=cfg.engine.mask_padding, all_reduce=lambda t: t
    )
    return DecodeEngine(cfg, *build_pair(cfg, group, "cpu"), CPU)


def watch(monkeypatch: pytest.MonkeyPatch, replace: Any = None) -> list[ForwardBatch]:
    """All batches that are validated; ``replace`` puts another scalar in after that."""
    seen: list[ForwardBatch] = []
    check = ForwardBatch.validate

    def validate(self: ForwardBatch, *args: Any, **kwargs: Any) -> None:
        check(self, *args, **kwargs)
        seen.append(copy.copy(self))
        if replace is not None:
            self.num_token_non_padded = replace()

    monkeypatch.setattr(ForwardBatch, "validate", validate)
    return seen


def decode(eng: DecodeEngine, *, idle: bool) -> list[list[int]]:
    """A prefill and three rounds, or an idle round; the committed tokens."""
    if idle:
        eng.idle_step()
        return []
    requests = [Request(prompt=[3, 1, 4], max_new_tokens=64), Request(prompt=[1, 5, 9, 2, 6], max_new_tokens=64)]
    for r in requests:
        eng.join(r)
    eng.join(Request(prompt=[2], max_new_tokens=64))
    for _ in range(3):
        eng.step()
    return [r.new_tokens for r in requests]


@torch.inference_mode()
@pytest.mark.parametrize("idle", [False, True], ids=["eager", "idle"])
@pytest.mark.parametrize("scalar", ["set", "none", "poisoned"])
def test_predicate_false_nobody_reads_the_device_scalar(scalar: str, idle: bool, monkeypatch) -> None:
    cfg = preset("tiny", device="cpu", batch_size=3, alloc="on_demand")
    expected = decode(engine(cfg), idle=idle)
    values = {"set": lambda: torch.tensor(1, dtype=torch.int32), "none": lambda: None, "poisoned": poison}
    seen = watch(monkeypatch, values[scalar])
    assert decode(engine(cfg), idle=idle) == expected
    assert len(seen) == (2 if idle else 3 + 2 * 3)
    for batch in seen:
        assert batch.num_token_non_padded is None  # on_demand builds nothing at EP1
        check_cpu_count(batch, idle)


@torch.inference_mode()
@pytest.mark.parametrize("idle", [False, True], ids=["eager", "idle"])
@pytest.mark.parametrize("alloc", ["blocking", "non_blocking", "on_demand", "pinned", "persistent"])
def test_predicate_true_every_path_sets_the_scalar(alloc: str, idle: bool, monkeypatch) -> None:
    seen = watch(monkeypatch)
    decode(engine(preset("tiny", device="cpu", batch_size=3, ep_size=2, alloc=alloc)), idle=idle)
    assert len(seen) == (2 if idle else 3 + 2 * 3)
    for batch in seen:
        scalar = batch.num_token_non_padded
        assert scalar is not None
        assert scalar.dtype == torch.int32
        assert scalar.numel() == 1
        check_cpu_count(batch, idle)


@torch.inference_mode()
@pytest.mark.parametrize("idle", [False, True], ids=["eager", "idle"])
def test_predicate_true_the_scalar_is_read(idle: bool, monkeypatch) -> None:
    watch(monkeypatch, poison)
    with pytest.raises(AssertionError, match="the device scalar was read"):
        decode(engine(preset("tiny", device="cpu", batch_size=3, ep_size=2)), idle=idle)


@torch.inference_mode()
def test_predicate_true_none_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(ScalarSource, "make", lambda self, n: None)
    with pytest.raises(LabError, match="num_token_non_padded is None and ep_size=2"):
        decode(engine(preset("tiny", device="cpu", batch_size=3, ep_size=2)), idle=False)


@torch.inference_mode()
def test_mask_off_nobody_reads_it_at_ep_2(monkeypatch) -> None:
    cfg = preset("tiny", device="cpu", batch_size=3, ep_size=2, alloc="none", mask_padding=False)
    watch(monkeypatch, poison)
    decode(engine(cfg), idle=False)


def check_cpu_count(batch: ForwardBatch, idle: bool) -> None:
    """The host's count is always there and exact; three requests in a bucket of four, or a prefill's own rows."""
    rows = batch.num_tokens_per_req
    expected = 0 if idle else (3 * rows if batch.batch_size == 4 else rows)
    assert batch.num_token_non_padded_cpu == expected


@torch.inference_mode()
def test_a_wrong_host_count_is_refused(monkeypatch) -> None:
    eng = engine(preset("tiny", device="cpu", batch_size=3))
    eng.join(Request(prompt=[3, 1, 4], max_new_tokens=64))
    batch = eng.rounds.build_verify_batch(1, max_keys=16, num_requests=1, num_token_non_padded=None)
    for wrong in (0, -1, batch.num_tokens + 1, None):
        batch.num_token_non_padded_cpu = wrong  # type: ignore[assignment]
        with pytest.raises(LabError, match="num_token_non_padded_cpu"):
            batch.validate(EP1)


@torch.inference_mode()
def test_masked_rows_change_no_token_and_are_not_computed() -> None:
    """Three requests in a bucket of four: with the mask the fourth's rows reach no expert, without it they do."""
    computed = {}
    tokens = {}
    for mask in (True, False):
        cfg = preset("tiny", device="cpu", batch_size=3, ep_size=2, alloc="on_demand", mask_padding=mask)
        eng = engine(cfg)
        load = eng.target.watch_load()
        assert load is not None
        tokens[mask] = decode(eng, idle=False)
        computed[mask] = sum(map(sum, load.report()["rows"]))
    assert tokens[True] == tokens[False]
    assert computed[True] < computed[False]


# -- the helper and the strategies ---------------------------------------------------------------------------------


def test_the_seeds_helper_on_both_paths() -> None:
    assert make_num_token_non_padded(5, parallel=EP1, device="cpu") is None
    scalar = make_num_token_non_padded(5, parallel=EP2, device="cpu")
    assert scalar is not None
    assert scalar.dtype == torch.int32
    assert scalar.item() == 5


@pytest.mark.parametrize("alloc", ["blocking", "non_blocking", "on_demand", "pinned", "persistent"])
def test_every_strategy_holds_the_count_step_after_step(alloc: str) -> None:
    source = ScalarSource(alloc, EP2, CPU)
    for n in range(1, 3 * RING):
        scalar = source.make(n)
        assert scalar is not None
        assert (scalar.item(), scalar.dtype, scalar.numel()) == (n, torch.int32, 1)
    assert source.num_built == 3 * RING - 1


@pytest.mark.parametrize(
    ("alloc", "built"),
    [("none", 0), ("on_demand", 0), ("pinned", 0), ("persistent", 0), ("blocking", 3), ("non_blocking", 3),
     ("pinned:always", 3)],
)  # fmt: skip
def test_what_is_built_at_ep_1(alloc: str, built: int) -> None:
    source = ScalarSource(alloc, EP1, CPU)
    scalars = [source.make(5) for _ in range(3)]
    assert source.num_built == built
    assert sum(s is not None for s in scalars) == built


def test_persistent_keeps_its_address() -> None:
    source = ScalarSource("persistent", EP2, CPU)
    first, second = source.make(3), source.make(4)
    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()


def test_graphs_are_refused_without_a_gpu_by_name() -> None:
    with pytest.raises(LabError, match="use_graph=True needs a GPU"):
        engine(preset("tiny", device="cpu", ep_size=2, use_graph=True, alloc="graph_slot"))
