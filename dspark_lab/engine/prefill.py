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
    """One request at a time, at its own length: no padding."""

    def __init__(self, cfg: LabConfig, rounds: Rounds, scalar: Callable[[int], Tensor | None]) -> None:
        self.cfg, self.rounds, self.scalar = cfg, rounds, scalar

    def run(self, prompt: list[int], slot: int) -> Tensor:
        """The first new token [1] int64, on the device."""
        r = self.rounds
        ids = r.state.upload(prompt)
        slots = torch.full((1,), slot, dtype=torch.int64, device=r.device)
        hidden: Tensor | None = None
        for start in range(0, len(prompt), CHUNK):
            end = min(start + CHUNK, len(prompt))
            hidden = self._chunk(ids[start:end], start, end, slots)
        assert hidden is not None
        return r.target.argmax(hidden[-1:])

    def _chunk(self, ids: Tensor, start: int, end: int, slots: Tensor) -> Tensor:
        r, n = self.rounds, end - start
        positions = torch.arange(start, end, device=r.device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            num_tokens_per_req=n,
            input_ids=ids,
            positions=positions,
            req_slots=slots,
            key_limits=positions + 1,
            max_keys=end,
            num_token_non_padded=self.scalar(n),
            num_token_non_padded_cpu=n,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        out = r.target.forward(batch, r.target_cache, capture_layers=self.cfg.model.drafter.target_layer_ids)
        r.drafter.write_context(out.aux, slots.expand(n), positions, r.draft_cache)
        return out.hidden
