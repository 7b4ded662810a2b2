"""`StepRunner`: one training step as a function of buffers, run eagerly or as one captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dspark_lab.train.optimizer import Optimizer

WARM_UPS = 3
"""Steps before a capture, with a learning rate of 0; what they leave in the optimizer is taken back."""


class StepRunner:
    """``losses`` reads `inputs` and gives scalars by name, ``total`` among them; a step is that, backward and the optimizer.

    Small models are bound by launches: a captured step is several times faster on a GPU. Addresses never change, values do.
    """

    def __init__(
        self,
        losses: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        optimizer: Optimizer,
        inputs: dict[str, Tensor],
        *,
        graph: bool = False,
    ) -> None:
        self.losses, self.optimizer, self.inputs = losses, optimizer, inputs
        self.scalars: dict[str, Tensor] = {}
        """Of the last step, on the device: what ``losses`` gave, detached, and ``grad_norm``."""
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph:
            self._capture()

    def __call__(self, lr: float, **inputs: Tensor) -> dict[str, Tensor]:
        """One step on ``inputs``, by the names and shapes given at construction."""
        for name, value in inputs.items():
            self.inputs[name].copy_(value, non_blocking=True)
        self.optimizer.set_lr(lr)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        return self.scalars

    def _step(self) -> None:
        self.optimizer.zero_grad()
        scalars = self.losses(self.inputs)
        scalars["total"].backward()
        norm = self.optimizer.step()
        self.scalars = {name: value.detach() for name, value in scalars.items()} | {"grad_norm": norm.detach()}

    def _capture(self) -> None:
        before = self.optimizer.moments()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.optimizer.set_lr(0.0)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.optimizer.restore(before)
        self.graph = graph
