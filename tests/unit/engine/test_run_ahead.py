"""The run-ahead loop: results come two rounds late, and requests that finish, join or reach their limit meanwhile stay right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark_lab.config import preset
from dspark_lab.engine.decode import LAG, DecodeEngine
from dspark_lab.engine.generate import generate, generate_plain
from dspark_lab.engine.request import Request
from dspark_lab.engine.state import BatchState
from dspark_lab.errors import LabError

CPU = torch.device("cpu")


@torch.inference_mode()
def test_results_are_read_two_rounds_late(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2, overlap=True)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    engine.join(Request(prompt=[3, 1, 4], max_new_tokens=64))
    arrived = [[r.index for r in engine.step()] for _ in range(5)]
    assert arrived == [[], [], [0], [1], [2]]
    assert [r.index for r in engine.drain()] == [3, 4]
    assert LAG == 2


@torch.inference_mode()
def test_results_stand_where_they_were_written_until_they_are_read(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2, overlap=True)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    engine.join(Request(prompt=[3, 1, 4], max_new_tokens=64))
    written = []
    for n in range(6):
        arrived = engine.step()
        written.append(engine.rounds.sent[n % (LAG + 2), 0].tolist())
        for r in arrived:
            *tokens, num, proposed, index = written[r.index]
            assert (r.tokens, r.accept_lengths, r.proposal_lengths) == ([tokens[:num]], [num], [proposed])
            assert index == r.index
    assert len({*map(tuple, written)}) == 6


@torch.inference_mode()
def test_results_of_another_round_are_never_taken_for_the_awaited_ones(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=1, overlap=True)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    engine.join(Request(prompt=[3, 1, 4], max_new_tokens=64))
    engine.step()
    engine.step()
    engine.rounds.num_rounds += 2  # rounds that the host does not know of
    with pytest.raises(AssertionError, match="results of round 4 stand where those of round 0 belong"):
        engine.step()


@pytest.mark.parametrize("weights", ["bigram", "random"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_lossless_with_requests_that_come_and_go(batch_size: int, weights: str, models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=batch_size, overlap=True, weights=weights)
    pair = models(cfg)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 255, n).tolist() for n in (1, 7, 3, 12, 5, 9, 2)]
    out = generate(cfg, prompts, max_new_tokens=17, models=pair)
    simple = generate(cfg.replace(overlap=False), prompts, max_new_tokens=17, models=pair)
    for o, s, prompt in zip(out, simple, prompts, strict=True):
        assert o == s  # tokens and the lengths of every round
        assert o.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=17)


@torch.inference_mode()
def test_a_request_never_outgrows_its_limit_while_rounds_are_in_flight(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=1, overlap=True, context_len=64, prompt_len=3, max_new_tokens=55)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    request = Request(prompt=[3, 1, 4], max_new_tokens=55)
    engine.join(request)
    before = engine.rounds.target_cache.checksum(0)
    while engine.active:
        engine.step()
    engine.drain()
    assert before != engine.rounds.target_cache.checksum(0)
    assert int(engine.rounds.state.seq_lens.max()) <= 0 + 3 + 55 + cfg.model.drafter.block_size + 1
    assert sum(request.acceptance_lengths) >= 55
    assert sum(request.acceptance_lengths[:-1]) < 55


@torch.inference_mode()
def test_rounds_after_the_end_write_to_the_dummy_slot_only(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2, overlap=True)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    engine.join(Request(prompt=[3, 1, 4], max_new_tokens=1))
    engine.rounds.draft(1, max_keys=32, num_requests=1, num_token_non_padded=None)
    engine.rounds.verify(1, max_keys=32, num_requests=1, num_token_non_padded=None)
    caches = (engine.rounds.target_cache, engine.rounds.draft_cache)
    sums = [c.checksum(s) for c in caches for s in (0, 1)]
    table = engine.rounds.state.table.clone()
    for _ in range(2):  # two more rounds were launched before the host knew
        engine.rounds.draft(1, max_keys=32, num_requests=1, num_token_non_padded=None)
        engine.rounds.verify(1, max_keys=32, num_requests=1, num_token_non_padded=None)
    assert [c.checksum(s) for c in caches for s in (0, 1)] == sums
    assert torch.equal(engine.rounds.state.table, table)
    assert engine.rounds.packed[0, engine.gamma + 1] == 0


def test_state_keeps_rows_in_order_and_pads_the_rest() -> None:
    state = BatchState(4, dummy_slot=9, device=CPU)
    for row in range(3):
        state.join(row, anchor=torch.tensor([10 + row]), seq_len=20 + row, slot=row, limit=30 + row)
    at = state.table.data_ptr()
    state.keep([2, 0])
    assert state.anchors.tolist() == [12, 10, 0, 0]
    assert state.seq_lens.tolist() == [22, 20, 0, 0]
    assert state.slots.tolist() == [2, 0, 9, 9]
    assert state.limits.tolist() == [32, 30, 0, 0]
    assert state.table.data_ptr() == at


@torch.inference_mode()
def test_host_work_is_busy_and_measured(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=1, host_work_us=300.0)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    engine.join(Request(prompt=[3], max_new_tokens=64))
    for _ in range(3):
        engine.step()
    assert len(engine.host_work_us) == 3
    assert all(t >= 300.0 for t in engine.host_work_us)


@torch.inference_mode()
def test_slots_and_empty_batches_are_refused_by_name(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=1)
    engine = DecodeEngine(cfg, *models(cfg), CPU)
    with pytest.raises(LabError, match="no request is active"):
        engine.step()
    engine.join(Request(prompt=[3], max_new_tokens=8))
    with pytest.raises(LabError, match="all 1 slots are taken"):
        engine.join(Request(prompt=[3], max_new_tokens=8))
    with pytest.raises(LabError, match="this one has 1"):
        engine.idle_step()
