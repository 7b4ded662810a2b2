"""`ForwardBatch`: everything one forward of target or drafter reads, with its contract."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.errors import LabError
from dspark_lab.plan.padding import enable_num_token_non_padded
from dspark_lab.spec.compact import Compact


class ForwardMode(Enum):
    """What a forward is for."""

    EXTEND = "extend"
    """Prefill: the rows of a prompt."""
    TARGET_VERIFY = "target_verify"
    """A block of rows a request: the target's verification, and the drafter's block too."""
    IDLE = "idle"
    """No real rows: a rank that takes part in collectives only."""


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """The rows of a compact batch among the places of a padded one: what attention reads by request. See `spec.compact`."""

    index: Compact
    key_limits: Tensor
    """[B*Q] int64 of the places."""


@dataclass(kw_only=True)
class ForwardBatch:
    """One forward over ``batch_size`` requests (B) of ``num_tokens_per_req`` rows (Q) each; real requests come first.

    Shapes are static: padded requests take part with rows of their own, and point at the cache's dummy slot.
    """

    forward_mode: ForwardMode
    batch_size: int
    """B, padded requests included."""
    num_tokens_per_req: int
    """Q: rows of each request."""
    input_ids: Tensor
    """[B*Q] int64."""
    positions: Tensor
    """[B*Q] int64, where each row stands in its request; its K/V are written there."""
    req_slots: Tensor
    """[B] int64, the slot of the KV cache of each request."""
    key_limits: Tensor
    """[B*Q] int64: a row sees cache positions below its limit (causal: position + 1; a draft block: seq_len + γ)."""
    max_keys: int
    """An upper bound over `key_limits`, known to the host: how much of the cache attention reads."""
    num_token_non_padded: Tensor | None = None
    """One int32 on the device, 0-dim or (1,): rows before it are real. Read by MoE layers where ``ep_size > 1`` only."""
    num_token_non_padded_cpu: int
    """The same count on the host; always set."""
    spec_algorithm: str = "DSPARK"
    slots_by_row: Tensor | None = None
    """[B*Q] int64, `req_slots` by row, where whoever made the batch has it already."""
    ragged: Ragged | None = None
    """Where requests have different numbers of rows: then T is what `input_ids` holds, at most B*Q, and the shapes above that
    say [B*Q] are [T]."""

    @property
    def num_tokens(self) -> int:
        """T: rows of the forward, B*Q unless it is ragged."""
        if self.ragged is not None:
            return self.ragged.index.places.shape[0]
        return self.batch_size * self.num_tokens_per_req

    @property
    def is_idle(self) -> bool:
        return self.forward_mode is ForwardMode.IDLE

    @property
    def token_slots(self) -> Tensor:
        """[B*Q] int64: the slot of each row."""
        if self.slots_by_row is not None:
            return self.slots_by_row
        return self.req_slots[:, None].expand(-1, self.num_tokens_per_req).reshape(-1).contiguous()

    def validate(self, parallel: ParallelConfig, *, mask_padding: bool = True) -> None:
        """Raises `LabError` by the name of the field that breaks the contract. Reads shapes and host values only: no sync."""
        for name, rows in (
            ("input_ids", self.num_tokens),
            ("positions", self.num_tokens),
            ("key_limits", self.num_tokens),
            ("req_slots", self.batch_size),
        ):
            self._check_tensor(name, rows)
        self._check_count()
        self._check_scalar(enable_num_token_non_padded(parallel) and mask_padding, parallel.ep_size)
        if self.max_keys < 1:
            raise LabError(
                f"max_keys={self.max_keys} leaves attention nothing to read; it bounds key_limits from above."
            )

    def _check_tensor(self, name: str, rows: int) -> None:
        tensor: Tensor = getattr(self, name)
        shape, q = tuple(tensor.shape), self.num_tokens_per_req
        if shape != (rows,):
            raise LabError(
                f"{name} has shape {shape} and must have ({rows},): batch_size {self.batch_size}, {q} rows each"
                f"{'' if self.ragged is None else ' at most'}."
            )
        if tensor.dtype != torch.int64:
            raise LabError(f"{name} has dtype {tensor.dtype} and must have torch.int64.")
        if tensor.device != self.input_ids.device:
            raise LabError(
                f"{name} is on {tensor.device} and input_ids on {self.input_ids.device}; both must be on one device."
            )

    def _check_count(self) -> None:
        count = self.num_token_non_padded_cpu
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.num_tokens:
            raise LabError(f"num_token_non_padded_cpu={count!r} is not a whole number of 0 to {self.num_tokens} rows.")
        if count == 0 and not self.is_idle:
            raise LabError(
                f"num_token_non_padded_cpu=0 with forward_mode={self.forward_mode.name} would mask every row; "
                "only an IDLE batch has no real rows."
            )
        if count and self.is_idle:
            raise LabError(f"num_token_non_padded_cpu={count} in an IDLE batch, which has no real rows; it must be 0.")

    def _check_scalar(self, needed: bool, ep_size: int) -> None:
        scalar = self.num_token_non_padded
        if scalar is None:
            if needed:
                raise LabError(
                    f"num_token_non_padded is None and ep_size={ep_size}: MoE layers read it to mask padded rows; "
                    "set it on every path, or use mask_padding=False."
                )
            return
        if scalar.dtype != torch.int32:
            raise LabError(f"num_token_non_padded has dtype {scalar.dtype} and must have torch.int32.")
        if tuple(scalar.shape) not in ((), (1,)):
            raise LabError(
                f"num_token_non_padded has shape {tuple(scalar.shape)} and must hold one element: () or (1,)."
            )
        if scalar.device != self.input_ids.device:
            raise LabError(
                f"num_token_non_padded is on {scalar.device} and must be on {self.input_ids.device}, as input_ids."
            )
