"""Router: softmax over all experts, top-k, renormalisation, map to physical experts, mask of padded rows; in one kernel."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from dspark_kernels.backend import on_triton
from dspark_kernels.linear.reference import Slices
from dspark_kernels.router import reference
from dspark_kernels.router.reference import NormedRoute

__all__ = ["NormedRoute", "gate_and_route", "norm_gate_route", "route"]


def route(
    logits: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``logits`` [T, E] to ``topk_ids`` [T, k] int64 and ``topk_weights`` [T, k] float32; see `reference.route`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(logits, logits.shape[-1], k, count, physical, num_copies)
    return _backend(logits).route(
        logits, k, renormalize=renormalize, count=count, physical=physical, num_copies=num_copies
    )


def gate_and_route(
    x: Tensor,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` of ``x`` [T, H] · ``gate`` [E, H]ᵀ with the logits in float32 throughout.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if gate.dim() != 2 or x.shape[-1] != gate.shape[1] or x.dtype != gate.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and gate {tuple(gate.shape)} {gate.dtype} need one H and dtype."
        )
    _check(x, gate.shape[0], k, count, physical, num_copies)
    backend = _backend(x, dots=True)
    return backend.gate_and_route(
        x, gate, k, renormalize=renormalize, count=count, physical=physical, num_copies=num_copies
    )


def norm_gate_route(
    x: Tensor | Slices,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    k: int,
    *,
    renormalize: bool,
    count: Tensor | None = None,
    physical: Tensor | None = None,
    num_copies: Tensor | None = None,
) -> NormedRoute:
    """`gate_and_route` of the RMS norm of ``x`` + ``residual``, with that norm and sum; see `reference.norm_gate_route`.

    ``x`` [T, H], or a product in slices that is [T, H] once added up.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if gate.dim() != 2 or residual.shape[-1] != gate.shape[1] or residual.dtype != gate.dtype:
        raise ValueError(
            f"rows {tuple(residual.shape)} {residual.dtype} and gate {tuple(gate.shape)} {gate.dtype} need one H and dtype."
        )
    shape = tuple((x.parts if isinstance(x, Slices) else x).shape[-2:])
    if norm_weight.shape != residual.shape[1:] or tuple(residual.shape) != shape:
        raise ValueError(
            f"x {shape}, residual {tuple(residual.shape)} and norm_weight {tuple(norm_weight.shape)} do not fit."
        )
    _check(residual, gate.shape[0], k, count, physical, num_copies)
    backend = _backend(residual, dots=True)
    if backend is reference and isinstance(x, Slices):
        x = x.sum()
    return backend.norm_gate_route(
        x, residual, norm_weight, eps, gate, k, renormalize=renormalize, count=count, physical=physical
    )


def _check(
    rows: Tensor,
    num_experts: int,
    k: int,
    count: Tensor | None,
    physical: Tensor | None,
    num_copies: Tensor | None,
) -> None:
    if rows.dim() != 2:
        raise ValueError(f"Rows must have two dimensions, not the shape {tuple(rows.shape)}.")
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k} is not within 1 to {num_experts}, the number of experts.")
    if count is not None and count.numel() != 1:
        raise ValueError(f"count must hold one element, not {count.numel()}.")
    if physical is not None and (
        physical.shape[-1] != num_experts or (num_copies is None) != (physical.numel() == num_experts)
    ):
        raise ValueError(
            f"physical must have the shape ({num_experts},), or (C, {num_experts}) beside num_copies, not {tuple(physical.shape)}."
        )
    if num_copies is not None and (physical is None or tuple(num_copies.shape) != (num_experts,)):
        raise ValueError(f"num_copies {tuple(num_copies.shape)} must be ({num_experts},), beside physical.")


def _backend(rows: Tensor, *, dots: bool = False) -> ModuleType:
    if not on_triton(rows, products=dots):
        return reference
    from dspark_kernels.router import kernel

    return kernel
