"""The eager engine on a GPU: lossless, the same tokens as on the CPU, and no host wait but the ones that are meant."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dspark_lab.config import LabConfig, preset
from dspark_lab.engine.alloc import ScalarSource
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.generate import generate, generate_plain
from dspark_lab.engine.request import Request, workload
from dspark_lab.models.weights import build

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """PyTorch's own watch over synchronising calls, in this region."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says once a process that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def started(cfg: LabConfig) -> DecodeEngine:
    engine = DecodeEngine(cfg, *build(cfg, "cuda"), torch.device("cuda", 0))
    requests = workload(cfg)
    for _ in range(cfg.engine.batch_size):
        engine.join(next(requests))
    engine.step()
    return engine


@pytest.mark.parametrize("experts", [8, 0], ids=["moe", "dense"])
def test_lossless_in_float32(experts: int) -> None:
    cfg = preset("tiny", device="cuda", batch_size=3, target_num_experts=experts, draft_num_experts=experts)
    pair = build(cfg, "cuda")
    for out, prompt in zip(generate(cfg, PROMPTS, max_new_tokens=48, models=pair), PROMPTS, strict=True):
        assert out.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=48)


@pytest.mark.parametrize("graph", [False, True])
def test_without_speculation(graph: bool) -> None:
    cfg = preset("tiny", device="cuda", batch_size=3, speculate=False, use_graph=graph, overlap=True)
    pair = build(cfg, "cuda")
    for out, prompt in zip(generate(cfg, PROMPTS, max_new_tokens=48, models=pair), PROMPTS, strict=True):
        assert out.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=48)
        assert set(out.acceptance_lengths) == {1}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_round_waits_for_the_host_nowhere_but_at_its_end(name: str) -> None:
    toggles = {"prompt_len": 32, "max_new_tokens": 64} if name == "small" else {"dtype": "bfloat16"}
    engine = started(preset(name, device="cuda", batch_size=3, alloc="on_demand", overlap=True, **toggles))
    with syncs_are_errors():
        engine.rounds.draft(4, max_keys=64, num_requests=3, num_token_non_padded=None)
        engine.rounds.verify(4, max_keys=64, num_requests=3, num_token_non_padded=None)


@torch.inference_mode()
@pytest.mark.parametrize("alloc", ["blocking", "non_blocking", "pinned:always", "persistent:always"])
def test_only_blocking_synchronises(alloc: str) -> None:
    source = ScalarSource(alloc, preset("tiny").parallel, torch.device("cuda", 0))
    source.make(3)
    with warnings.catch_warnings(), syncs_are_errors():
        if alloc == "blocking":
            with pytest.raises(RuntimeError, match="synchroniz"):
                source.make(4)
            return
        scalar = source.make(4)
    assert scalar is not None
    assert (int(scalar), scalar.dtype, scalar.device.type) == (4, torch.int32, "cuda")


@torch.inference_mode()
def test_grouped_experts_equal_a_dense_loop_in_bfloat16() -> None:
    cfg = preset("small", device="cuda", prompt_len=32, max_new_tokens=64)
    target, _ = build(cfg, "cuda")
    experts = target.model.moe_layers[0].experts
    x = torch.randn(37, cfg.model.target.hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(-1, 64, (37, 6), device="cuda")
    weights = torch.rand(37, 6, device="cuda")
    got = experts(x, ids, weights).float()
    dense = torch.zeros_like(got)
    for row in range(37):
        for k in range(6):
            e = int(ids[row, k])
            if e >= 0:
                gate, up = (experts.gate_up_proj[e].float() @ x[row].float()).chunk(2)
                y = experts.down_proj[e].float() @ (torch.nn.functional.silu(gate) * up)
                dense[row] += weights[row, k] * y
    assert (got - dense).norm() / dense.norm() < 1e-2
    nothing = experts(x, torch.full_like(ids, -1), weights)
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_every_strategy_gives_the_same_tokens_in_bfloat16() -> None:
    outs = []
    pair = None
    for alloc in ("none", "blocking", "non_blocking", "pinned:always", "persistent:always"):
        cfg = preset("small", device="cuda", batch_size=3, alloc=alloc, prompt_len=32, max_new_tokens=64)
        pair = pair or build(cfg, "cuda")
        outs.append(generate(cfg, PROMPTS, max_new_tokens=48, models=pair))
    assert all(o == outs[0] for o in outs)


def test_memory_is_refused_before_anything_is_allocated() -> None:
    cfg = preset("small", device="cuda", batch_size=128, context_len=2_000_000)
    before = torch.cuda.memory_allocated()
    small = preset("tiny", device="cuda")
    pair = build(small, "cuda")
    with pytest.raises(ValueError, match="batch_size=128 with context_len=2000000 needs"):
        DecodeEngine(cfg, *pair, torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() - before < 2**30


def test_requests_of_a_batch_do_not_touch_each_other() -> None:
    cfg = preset("tiny", device="cuda", batch_size=3)
    pair = build(cfg, "cuda")
    together = generate(cfg, PROMPTS, max_new_tokens=32, models=pair)
    alone = [generate(cfg, [p], max_new_tokens=32, models=pair)[0] for p in PROMPTS]
    assert [o.tokens for o in together] == [o.tokens for o in alone]
    assert Request(prompt=[1], max_new_tokens=1).tokens == [1]
