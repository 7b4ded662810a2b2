"""Plain steps over the models, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_lab.config.parts import DecoderConfig, DrafterConfig, ModelConfig, ParallelConfig
from dspark_lab.ep.groups import ONE_RANK, ParallelGroups
from dspark_lab.models.batch import ForwardBatch, ForwardMode


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def batch_of(ids: Tensor, starts: Tensor, slots: Tensor, *, block: bool = False, **fields) -> ForwardBatch:
    """Rows ``ids`` [B, Q] from positions ``starts`` [B]; causal, or seeing the whole block."""
    b, q = ids.shape
    positions = starts[:, None] + torch.arange(q)
    limits = (starts[:, None] + q).expand(b, q) if block else positions + 1
    values = {
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "batch_size": b,
        "num_tokens_per_req": q,
        "input_ids": ids.reshape(-1),
        "positions": positions.reshape(-1),
        "req_slots": slots,
        "key_limits": limits.reshape(-1),
        "max_keys": int(limits.max()),
        "num_token_non_padded_cpu": b * q,
    }
    return ForwardBatch(**{**values, **fields})


def decoder_config(**changes) -> DecoderConfig:
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    return DecoderConfig(**{**values, **changes})


def model_config(**changes) -> ModelConfig:
    target = decoder_config(**changes)
    drafter = DrafterConfig(block_size=4, target_layer_ids=(-1, 1), mask_token_id=63, markov_rank=8)
    return ModelConfig(target=target, draft=decoder_config(**changes), drafter=drafter, context_len=64)


class ThreadRank:
    """One of the threads that stand for the ranks of a group; counts what it sends."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.parts, self.barrier = rank, len(parts), parts, barrier
        self.num_reduced, self.num_gathered, self.most_gathered = 0, 0, 0

    def _exchange(self, tensor: Tensor) -> Tensor:
        self.parts[self.rank] = tensor.clone()
        self.barrier.wait(timeout=30)
        all_parts = torch.stack(self.parts)  # as NCCL and gloo: shapes must agree
        self.barrier.wait(timeout=30)
        return all_parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.num_reduced += 1
        return tensor.copy_(self._exchange(tensor).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.num_gathered += 1
        self.most_gathered = max(self.most_gathered, tensor.numel())
        return self._exchange(tensor)


def thread_ranks(size: int) -> list[ThreadRank]:
    parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    return [ThreadRank(rank, parts, barrier) for rank in range(size)]


def on_ranks(parallel: ParallelConfig, work: Callable[[ParallelGroups], Any]) -> list[Any]:
    """What ``work`` returns on each rank of ``parallel``, a thread a rank; raises what any of them raised."""
    world, tp = parallel.world_size, parallel.tp_size
    moe = thread_ranks(world)
    tps = [rank for _ in range(world // tp) for rank in thread_ranks(tp)]
    results, errors = [None] * world, []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                groups = ParallelGroups(tp=tps[rank] if tp > 1 else ONE_RANK, moe=moe[rank] if world > 1 else ONE_RANK)
                results[rank] = work(groups)
        except BaseException as e:
            errors.append(e)
            for group in (*moe, *tps):
                group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def plain() -> SimpleNamespace:
    return SimpleNamespace(
        batch_of=batch_of, decoder_config=decoder_config, model_config=model_config, on_ranks=on_ranks
    )
