"""`TokenData`: token sequences of one length with their loss masks, and the batch of any step, so that a run can go on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError

MIN_LOSS_TOKENS = 14
"""Sequences with fewer are dropped."""


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """``tokens`` [N, S] of any integer dtype and ``loss_mask`` [N, S] bool, true where a token is to be predicted."""

    tokens: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_len(self) -> int:
        return self.tokens.shape[1]

    @property
    def digest(self) -> str:
        """Tells whether two hold the same."""
        return digest(self.tokens, self.loss_mask)

    def to(self, device: torch.device | str) -> TokenData:
        return TokenData(tokens=self.tokens.to(device), loss_mask=self.loss_mask.to(device))

    def rows(self, step: int, batch_size: int, seed: int) -> Tensor:
        """[B] int64: which sequences ``step`` takes. Every epoch is a permutation of its own, and no state is kept."""
        first = step * batch_size
        places = [divmod(i, len(self)) for i in range(first, first + batch_size)]
        return torch.tensor([int(_order(len(self), epoch, seed)[place]) for epoch, place in places])

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, S] int64 and mask [B, S] of ``rows`` [B]."""
        rows = rows.to(self.tokens.device)
        return self.tokens[rows].long(), self.loss_mask[rows]


def digest(*tensors: Tensor) -> str:
    """16 hex digits of what ``tensors`` hold and their shapes."""
    found = hashlib.sha256()
    for t in tensors:
        values = t.detach().cpu().contiguous().numpy()
        found.update(f"{values.dtype}{values.shape}".encode() + values.tobytes())
    return found.hexdigest()[:16]


@lru_cache(maxsize=4)
def _order(num: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num)


def token_data(
    sequences: Sequence[Sequence[int]], seq_len: int, *, prompt_lens: Sequence[int] | None = None
) -> TokenData:
    """``sequences`` of token ids, cut to ``seq_len`` and padded with 0 where nothing is predicted.

    ``prompt_lens``: tokens at each one's start that are given and not predicted. Sequences with fewer than `MIN_LOSS_TOKENS`
    to predict are dropped. Raises `LabError` where none is left, and for what is no list of token ids.
    """
    if not is_int(seq_len) or seq_len < 1:
        raise LabError(f"seq_len={shown(seq_len)} is not a whole number of at least 1.")
    _check_sequences(sequences)
    prompts = [0] * len(sequences) if prompt_lens is None else list(prompt_lens)
    if len(prompts) != len(sequences):
        raise LabError(f"prompt_lens has {len(prompts)} entries for {len(sequences)} sequences; give one a sequence.")
    kept = [
        (list(s[:seq_len]), p)
        for s, p in zip(sequences, prompts, strict=True)
        if min(len(s), seq_len) - p >= MIN_LOSS_TOKENS
    ]
    if not kept:
        raise LabError(
            f"none of {len(sequences)} sequences has {MIN_LOSS_TOKENS} tokens to predict within seq_len={seq_len}; "
            "give longer ones."
        )
    tokens = torch.zeros(len(kept), seq_len, dtype=torch.int32)
    mask = torch.zeros(len(kept), seq_len, dtype=torch.bool)
    for row, (ids, prompt) in enumerate(kept):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        mask[row, prompt : len(ids)] = True
    return TokenData(tokens=tokens, loss_mask=mask)


def _check_sequences(sequences: Sequence[Sequence[int]]) -> None:
    """Arrays and lists of lists of whole numbers pass; texts, floats and a single sequence do not."""
    way = "give lists of token ids, such as [[1, 2, ...]]; of texts for a byte-level model, list(text.encode())"
    if not hasattr(sequences, "__len__") or isinstance(sequences, str | bytes | dict):
        raise LabError(f"data={shown(sequences)} is no list of token sequences; {way}.")
    for one in sequences:
        try:
            ids = np.asarray(one)
            whole = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise LabError(f"data holds {shown(one)}, which is no sequence of token ids; {way}.")
        if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise LabError(f"data has token ids from {ids.min()} to {ids.max()}, which no vocabulary holds.")
