"""What training needs of the frozen target: draft context and final hidden states, cached or computed on the fly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dspark_lab.models.decoder import Target
from dspark_lab.train.data import TokenData
from dspark_lab.train.forward import causal_forward


class TargetStates(Protocol):
    """Where they come from."""

    def inputs(self, rows: Tensor) -> dict[str, Tensor]:
        """What a step gets beside the tokens of ``rows`` [B]: by name, of one shape in each step."""
        ...

    def of(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Context [B, S, n·H] and final-normed hidden [B, S, H] of ``tokens`` [B, S], from what `inputs` gave."""
        ...


class OnTheFly:
    """One forward of the target a step: nothing is stored."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        self.target, self.layer_ids = target, layer_ids

    def inputs(self, rows: Tensor) -> dict[str, Tensor]:
        return {}

    def of(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            states = causal_forward(self.target.model, tokens, self.layer_ids)
        return states.aux, states.hidden


class Cached:
    """Every sequence through the target once, before the first step; (n + 1)·H values a token are held on ``device``."""

    def __init__(
        self, target: Target, layer_ids: tuple[int, ...], data: TokenData, *, device: torch.device, batch_size: int = 8
    ) -> None:
        fresh = OnTheFly(target, layer_ids)
        where = target.model.device
        parts = []
        for first in range(0, len(data), batch_size):
            rows = torch.arange(first, min(first + batch_size, len(data)))
            parts.append([x.to(device) for x in fresh.of(data.batch(rows)[0].to(where), {})])
        self.aux, self.hidden = (torch.cat(part) for part in zip(*parts, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.aux.nbytes + self.hidden.nbytes

    def inputs(self, rows: Tensor) -> dict[str, Tensor]:
        rows = rows.to(self.aux.device)
        return {"aux": self.aux[rows], "hidden": self.hidden[rows]}

    def of(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return inputs["aux"], inputs["hidden"]
