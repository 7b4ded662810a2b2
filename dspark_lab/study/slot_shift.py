"""`slot_shift`: was a drafter's checkpoint read with the right slot shift? Read wrong, it drafts tokens one place off, and nothing fails.

Row k of a block predicts the token at anchor + k at shift 0 (DeepSpec), and at anchor + k − 1 at shift 1, where the anchor's own
row predicts nothing (the original DFlash, `speculators`): the toggle ``sample_from_anchor``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_lab.config import LabConfig
from dspark_lab.config.parts import ONE_BY_ONE
from dspark_lab.device import resolve
from dspark_lab.engine.generate import generate
from dspark_lab.engine.request import check_config, check_prompts
from dspark_lab.errors import LabError
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.weights import build

MARGIN = 0.1
"""Tokens a round by which the other reading has to be better before it is called the right one."""


class SlotShiftWarning(UserWarning):
    """A drafter accepts more when its rows are read at the other shift."""


@dataclass(frozen=True, kw_only=True)
class SlotShift:
    """Accept length of one drafter, read at both shifts, on the same prompts by greedy decoding."""

    configured: int
    """The shift that the config has: 0 with ``sample_from_anchor``, else 1."""
    accept_lengths: tuple[float, float]
    """Tokens a round, bonus included, at shift 0 and 1."""
    num_rounds: tuple[int, int]

    @property
    def is_wrong(self) -> bool:
        """Whether the other shift accepts more, by over `MARGIN`."""
        return self.accept_lengths[1 - self.configured] > self.accept_lengths[self.configured] + MARGIN

    def __str__(self) -> str:
        zero, one = self.accept_lengths
        found = f"accept length {zero:.2f} at shift 0, {one:.2f} at shift 1"
        if not self.is_wrong:
            return f"{found}; it is read at shift {self.configured}"
        return (
            f"{found}, and it is read at shift {self.configured}: set sample_from_anchor to "
            f"{str(self.configured == 1).lower()} in the drafter's config.json"
        )


@torch.inference_mode()
def slot_shift(cfg: LabConfig, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 48) -> SlotShift:
    """Continues ``prompts`` greedily with the drafter of ``cfg`` read at shift 0 and at shift 1, and warns where the other one accepts more.

    Real text is needed: on random ids a good drafter accepts as little as one read wrong. Raises `LabError` for drafters
    without a block, and for simulated acceptance.
    """
    check_config(cfg)
    check_prompts(prompts)
    d, sim = cfg.model.drafter, cfg.engine.simulated_accept_length
    if d.drafter_kind in ONE_BY_ONE:
        raise LabError(f"drafter_kind={d.drafter_kind!r} has no block whose rows could be read shifted.")
    if sim is not None:
        raise LabError(f"simulated_accept_length={sim} says nothing of the drafter; choose None.")
    cfg = cfg.replace(
        speculate=True,
        verify="static",
        confidence_threshold=0.0,
        sps_path=None,
        sts_path=None,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
    )
    target, drafter = build(cfg, resolve(cfg.engine.device))
    assert isinstance(drafter, Drafter)
    lengths, rounds = [], []
    for shift in (0, 1):
        read = cfg.replace(sample_from_anchor=shift == 0)
        made = generate(
            read, [list(p) for p in prompts], max_new_tokens=max_new_tokens, models=(target, _read_as(drafter, read))
        )
        accepted = [a for g in made for a in g.acceptance_lengths]
        if not accepted:
            raise LabError("there are no rounds to count; give prompts, and max_new_tokens of 2 or more.")
        lengths.append(sum(accepted) / len(accepted))
        rounds.append(len(accepted))
    found = SlotShift(
        configured=0 if d.sample_from_anchor else 1,
        accept_lengths=(lengths[0], lengths[1]),
        num_rounds=(rounds[0], rounds[1]),
    )
    if found.is_wrong:
        warnings.warn(str(found), SlotShiftWarning, stacklevel=2)
    return found


def _read_as(drafter: Drafter, cfg: LabConfig) -> Drafter:
    """The same weights, rows read as ``cfg`` says."""
    read = copy.copy(drafter)
    read.drafter_cfg, read.query_len = cfg.model.drafter, cfg.model.drafter.query_len
    return read
