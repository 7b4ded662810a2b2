"""`Optimizer`: AdamW over float32 masters of a model that computes in its own dtype, with warm-up, cosine and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up over a share of the steps, then a cosine to 0."""

    peak_lr: float
    num_steps: int
    warmup: float = 0.04

    def lr(self, step: int) -> float:
        """Learning rate of ``step``, from 0."""
        rise = max(1, round(self.warmup * self.num_steps))
        if step < rise:
            return self.peak_lr * (step + 1) / rise
        return 0.5 * self.peak_lr * (1 + math.cos(math.pi * (step - rise) / max(1, self.num_steps - rise)))


class Optimizer:
    """Masters are copies where the model is in bfloat16, and the parameters themselves where it is in float32.

    Nothing here waits for the device: the learning rate lies in a tensor, and clipping multiplies by a factor of at most 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        clip: float = 1.0,
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        device = self.parameters[0].device
        copied = any(p.dtype != torch.float32 for p in self.parameters)
        self.masters = [p.detach().float().clone().requires_grad_() if copied else p for p in self.parameters]
        self.copied, self.clip = copied, clip
        self.lr = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=self.lr if on_gpu else 0.0,
            betas=betas,
            weight_decay=weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )

    def set_lr(self, lr: float) -> None:
        """For the steps that follow; a captured step reads it from the device."""
        self.lr.fill_(lr)
        if self.lr.device.type != "cuda":
            self.adamw.param_groups[0]["lr"] = lr

    def step(self) -> Tensor:
        """Takes the gradients of the model, moves masters and model, and returns the norm before clipping (on the device)."""
        grads = [p.grad for p in self.parameters]
        assert all(g is not None for g in grads)
        if self.copied:
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = grad.float()  # pyright: ignore[reportOptionalMemberAccess]
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.adamw.step()
        if self.copied:
            with torch.no_grad():
                self._publish()
        return norm

    def _publish(self) -> None:
        torch._foreach_copy_(self.parameters, self.masters)  # pyright: ignore

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def moments(self) -> list[dict[str, Tensor]]:
        """Copies of moments and step count of each master; empty before the first step."""
        return [{k: v.clone() for k, v in self.adamw.state[m].items()} for m in self.masters if m in self.adamw.state]

    def restore(self, moments: list[dict[str, Tensor]]) -> None:
        """What `moments` gave, in place, since a captured step holds addresses; an empty list sets all to 0."""
        for i, master in enumerate(self.masters):
            for name, value in self.adamw.state[master].items():
                value.copy_(moments[i][name]) if moments else value.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"masters": [m.detach().cpu() for m in self.masters], "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
            if self.copied:
                self._publish()
        lr = self.adamw.param_groups[0]["lr"]
        self.adamw.load_state_dict(state["adamw"])
        self.adamw.param_groups[0]["lr"] = lr
