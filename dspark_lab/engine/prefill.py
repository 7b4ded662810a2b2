"""`Prefill`: a prompt through the target, in chunks; fills both caches and gives the first token, without a synchronise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.engine.rounds import Rounds
from dspark_lab.models.batch import ForwardBatch, ForwardMode

CHUNK = 1024
"""Prompt rows a forward: bounds the attention mask of long prompts."""


class Prefill:
    """One request at a time. Its rows are padded only where other ranks take part with rows of their own."""

    def __init__(self, cfg: LabConfig, rounds: Rounds, scalar: Callable[[int], Tensor | None]) -> None:
        self.cfg, self.rounds, self.scalar = cfg, rounds, scalar

    def run(self, prompt: list[int], slot: int, row: int, *, padded: int | None = None) -> Tensor:
        """The first new token [1] int64, on the device, of the request in ``row`` of the batch. ``padded``: rows of the
        forwards in all, at least the prompt's."""
        num_rows = padded or len(prompt)
        ids = self.rounds.state.upload(prompt + [0] * (num_rows - len(prompt)))
        last = self._chunks(ids, slot, num_real=len(prompt))
        assert last is not None
        target, samplers = self.rounds.target, self.rounds.samplers
        if samplers is None:
            return target.argmax(last)
        return samplers.first_token(row, target.logits(last), len(prompt) - 1)

    def idle(self, padded: int) -> None:
        """Takes part in the others' collectives: ``padded`` rows of the dummy slot, none of them real."""
        r = self.rounds
        self._chunks(r.state.upload([0] * padded), r.state.dummy_slot, num_real=0)

    def _chunks(self, ids: Tensor, slot: int, *, num_real: int) -> Tensor | None:
        """Hidden state [1, H] of the last real row; None without any."""
        slots = torch.full((1,), slot, dtype=torch.int64, device=self.rounds.device)
        last: Tensor | None = None
        for start in range(0, len(ids), CHUNK):
            end = min(start + CHUNK, len(ids))
            real = min(max(num_real - start, 0), end - start)
            hidden = self._chunk(ids[start:end], start, real, slots)
            last = hidden[real - 1 : real] if real else last
        return last

    def _chunk(self, ids: Tensor, start: int, real: int, slots: Tensor) -> Tensor:
        """The forward of ``ids`` at positions from ``start`` on. Rows from ``real`` on write K/V that nobody reads: a row
        sees what lies before it, and what a request has not reached is written again when it gets there."""
        r, n = self.rounds, len(ids)
        end = min(start + n, r.context_len)
        positions = torch.arange(start, start + n, device=r.device).clamp(max=end - 1)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND if real else ForwardMode.IDLE,
            batch_size=1,
            num_tokens_per_req=n,
            input_ids=ids,
            positions=positions,
            req_slots=slots,
            key_limits=positions + 1,
            max_keys=end,
            num_token_non_padded=self.scalar(real),
            num_token_non_padded_cpu=real,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        out = r.target.forward(batch, r.target_cache, capture_layers=r.context_layers)
        if real and r.gamma:
            r.drafter.write_context(out.aux[:real], slots.expand(real), positions[:real], r.draft_cache, ids[:real])
        return out.hidden
