"""Rounds: the few integers between the forwards of a speculative round: rows, acceptance, commit."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from dspark_kernels.accept.reference import Accepted
from dspark_kernels.backend import on_triton
from dspark_kernels.rounds import reference
from dspark_kernels.rounds.reference import Rows

__all__ = ["Rows", "accept_and_commit", "block_rows", "commit"]


def block_rows(
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    drafts: Tensor | None,
    *,
    width: int,
    mask_token: int,
    dummy_slot: int,
) -> Rows:
    """The rows of a draft block or of a verification; see `reference.block_rows`.

    Raises:
        ValueError: shapes that do not fit.
    """
    b = anchors.shape[0]
    if not seq_lens.shape == slots.shape == limits.shape == (b,) or (
        drafts is not None and tuple(drafts.shape) != (b, width - 1)
    ):
        raise ValueError(
            f"anchors, seq_lens, slots and limits must be [B], drafts [B, {width - 1}], not {tuple(anchors.shape)}, "
            f"{tuple(seq_lens.shape)}, {tuple(slots.shape)}, {tuple(limits.shape)} and "
            f"{None if drafts is None else tuple(drafts.shape)}."
        )
    kwargs = {"width": width, "mask_token": mask_token, "dummy_slot": dummy_slot}
    return _backend(anchors).block_rows(anchors, seq_lens, slots, limits, drafts, **kwargs)


def accept_and_commit(
    drafts: Tensor,
    lengths: Tensor,
    target_tokens: Tensor,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    simulated: Tensor | None,
    num_rounds: Tensor,
    *,
    dummy_slot: int,
    results: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> Tensor:
    """Acceptance and commit of a round, in place; see `reference.accept_and_commit`.

    Raises:
        ValueError: shapes that do not fit.
    """
    b, gamma = drafts.shape
    if tuple(target_tokens.shape) != (b, gamma + 1) or tuple(packed.shape) != (b, gamma + 3) or lengths.shape != (b,):
        raise ValueError(
            f"target_tokens {tuple(target_tokens.shape)}, packed {tuple(packed.shape)} and lengths {tuple(lengths.shape)} "
            f"must be {(b, gamma + 1)}, {(b, gamma + 3)} and {(b,)} beside drafts {tuple(drafts.shape)}."
        )
    if simulated is not None and (simulated.dim() != 2 or simulated.shape[1] < b):
        raise ValueError(f"simulated {tuple(simulated.shape)} must have a column for each of {b} requests.")
    _check_results(results, b, gamma)
    return _backend(anchors).accept_and_commit(
        drafts, lengths, target_tokens, anchors, seq_lens, slots, limits, packed, simulated, num_rounds,
        dummy_slot=dummy_slot, results=results, stop_ids=stop_ids,
    )  # fmt: skip


def commit(
    accepted: Accepted,
    lengths: Tensor,
    anchors: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    limits: Tensor,
    packed: Tensor,
    num_rounds: Tensor,
    *,
    dummy_slot: int,
    results: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> Tensor:
    """Commit of what was ``accepted`` by whatever rule, in place; see `reference.commit`.

    Raises:
        ValueError: shapes that do not fit.
    """
    b, width = accepted.out_tokens.shape
    if tuple(packed.shape) != (b, width + 2) or lengths.shape != (b,):
        raise ValueError(
            f"packed {tuple(packed.shape)} and lengths {tuple(lengths.shape)} must be {(b, width + 2)} and {(b,)} beside tokens "
            f"{tuple(accepted.out_tokens.shape)}."
        )
    _check_results(results, b, width - 1)
    return _backend(anchors).commit(
        accepted, lengths, anchors, seq_lens, slots, limits, packed, num_rounds,
        dummy_slot=dummy_slot, results=results, stop_ids=stop_ids,
    )  # fmt: skip


def _check_results(results: Tensor | None, b: int, gamma: int) -> None:
    if results is not None and tuple(results.shape[1:]) != (b, gamma + 4):
        raise ValueError(f"results {tuple(results.shape)} must be [rounds, {b}, {gamma + 4}].")


def _backend(tensor: Tensor) -> ModuleType:
    if not on_triton(tensor):
        return reference
    from dspark_kernels.rounds import kernel

    return kernel
