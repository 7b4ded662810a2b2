"""A decode loop in the style of a serving engine, in plain torch, that knows nothing of the guards it is tried on.

A scheduler holds running requests and admits new ones; a worker drafts a block, verifies it and says how much was accepted. ``Planted``
has the waits that such loops really had; in ``Mended`` they are gone: one persistent buffer for the scalar, lengths that stay on
the device, and results that come back through pinned memory and are read a step later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

GAMMA = 5
VOCAB = 64
HIDDEN = 16


@dataclass
class Req:
    rid: int
    output_ids: list[int] = field(default_factory=list)
    max_new_tokens: int = 40

    @property
    def finished(self) -> bool:
        return len(self.output_ids) >= self.max_new_tokens


@dataclass
class Batch:
    input_ids: torch.Tensor
    seq_lens: torch.Tensor
    num_token_non_padded: torch.Tensor


@dataclass
class Result:
    next_ids: torch.Tensor
    accept_lens: torch.Tensor


class Model:
    """Hashes tokens to tokens; enough arithmetic for a block to be drafted and partly accepted."""

    def __init__(self, device: torch.device | str) -> None:
        gen = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=gen).to(device)
        self.head = torch.randn(HIDDEN, VOCAB, generator=gen).to(device)
        self.steps = torch.arange(GAMMA + 1, device=device)

    def forward(self, batch: Batch) -> Result:
        ids = (batch.input_ids[:, None] + self.steps) % VOCAB
        real = torch.arange(ids.numel(), device=ids.device).view_as(ids) < batch.num_token_non_padded
        logits = self.embed[ids] @ self.head
        next_ids = torch.where(real, logits.argmax(-1), 0)
        accept_lens = 1 + (next_ids + batch.seq_lens[:, None]).sum(1) % GAMMA
        return Result(next_ids, accept_lens)


class Scheduler:
    """Keeps ``max_bs`` requests running."""

    def __init__(self, device: torch.device | str, max_bs: int = 4) -> None:
        self.device = torch.device(device)
        self.model = Model(device)
        self.running = [Req(rid) for rid in range(max_bs)]
        self.done: list[Req] = []
        self.next_rid = max_bs
        self.last_ids = torch.zeros(max_bs, dtype=torch.long, device=device)
        self.seq_lens = torch.ones(max_bs, dtype=torch.long, device=device)

    def admit(self) -> None:
        for slot, req in enumerate(self.running):
            if req.finished:
                self.done.append(req)
                self.running[slot] = Req(self.next_rid)
                self.next_rid += 1

    def commit(self, rows: list[list[int]], accept_lens: list[int]) -> None:
        for req, row, n in zip(self.running, rows, accept_lens, strict=True):
            req.output_ids.extend(row[:n])
        self.admit()

    def advance(self, result: Result) -> None:
        self.last_ids.copy_(result.next_ids.gather(1, (result.accept_lens - 1)[:, None])[:, 0])
        self.seq_lens.add_(result.accept_lens)


class Planted(Scheduler):
    """The host waits for the device in every step."""

    def make_batch(self) -> Batch:
        num_tokens = len(self.running) * (GAMMA + 1)
        scalar = torch.tensor(num_tokens, dtype=torch.int32, device=self.device)  # PLANT scalar
        return Batch(self.last_ids, self.seq_lens, scalar)

    def step(self) -> None:
        result = self.model.forward(self.make_batch())
        self.advance(result)
        total = result.accept_lens.sum().item()  # PLANT item
        rows = result.next_ids.tolist()  # PLANT tolist
        lens = [int(n) for n in result.accept_lens]  # PLANT int
        assert total == sum(lens)
        self.commit(rows, lens)


class Mended(Scheduler):
    """The host is a step ahead: it reads what the step before put into pinned memory."""

    def __init__(self, device: torch.device | str, max_bs: int = 4) -> None:
        super().__init__(device, max_bs)
        self.num_token_non_padded = torch.zeros((), dtype=torch.int32, device=device)
        self.ring = [
            (
                torch.empty(max_bs, GAMMA + 1, dtype=torch.long, pin_memory=True),
                torch.empty(max_bs, dtype=torch.long, pin_memory=True),
                torch.cuda.Event(),
            )
            for _ in range(3)
        ]
        self.turn = 0
        self.in_flight: deque[int] = deque()

    def make_batch(self) -> Batch:
        self.num_token_non_padded.fill_(len(self.running) * (GAMMA + 1))
        return Batch(self.last_ids, self.seq_lens, self.num_token_non_padded)

    def step(self) -> None:
        result = self.model.forward(self.make_batch())
        self.advance(result)
        rows, lens, ready = self.ring[self.turn]
        rows.copy_(result.next_ids, non_blocking=True)
        lens.copy_(result.accept_lens, non_blocking=True)
        ready.record()
        self.in_flight.append(self.turn)
        self.turn = (self.turn + 1) % len(self.ring)
        if len(self.in_flight) == len(self.ring):
            self.retire()

    def retire(self) -> None:
        rows, lens, ready = self.ring[self.in_flight.popleft()]
        ready.synchronize()
        self.commit(rows.tolist(), lens.tolist())
