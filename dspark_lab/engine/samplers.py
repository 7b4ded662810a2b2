"""`Samplers`: how each row of the batch samples, on the device, and the random numbers of its rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dspark_kernels.sampling import ACCEPT, BONUS, DRAFT, SamplingRows, sample, uniforms
from dspark_lab.engine.state import BatchState
from dspark_lab.spec.sampling import Sampling

TEMPERATURE, TOP_P = range(2)
NUMBER, TOP_K, GREEDY = range(3)


class Samplers:
    """[max_rows + 1] settings a row, at addresses that never change, moved with the rows of `BatchState`.

    Random numbers go by (seed, number of the request, position of the anchor): what a request draws depends neither on the
    rows beside it nor on when a round runs, and a captured graph draws new ones in every replay.
    """

    def __init__(self, state: BatchState, *, seed: int, cuts: bool, gamma: int, vocab_size: int) -> None:
        self.state, self.seed, self.cuts, self.gamma = state, seed, cuts, gamma
        rows, device = state.max_rows, state.device
        self.floats = torch.ones(2, rows + 1, dtype=torch.float32, device=device)
        self.ints = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        self.draft_probs = torch.zeros(rows, gamma, vocab_size, dtype=torch.float32, device=device)
        """[rows, γ, V] what the drafts of the round at hand were drawn from."""

    def join(self, row: int, sampling: Sampling, number: int) -> None:
        """Settings of the request that takes ``row``; ``number`` names it in the workload."""
        upload = self.state.upload
        self.ints[:, row].copy_(upload([number, sampling.kept, int(sampling.is_greedy)]))
        values = upload([sampling.temperature, sampling.top_p], torch.float32)
        self.floats[:, row].copy_(values)

    def keep(self, order: Tensor) -> None:
        """Rows in the ``order`` [max_rows + 1] that `BatchState.keep` gave them."""
        self.floats.copy_(self.floats[:, order])
        self.ints.copy_(self.ints[:, order])

    def rows(self, b: int) -> SamplingRows:
        """The settings of the first ``b`` rows."""
        return self._rows(slice(0, b))

    def noise(self, b: int) -> Tensor:
        """[b, γ + 1, 3] uniforms of the round that starts at the rows' present lengths."""
        return uniforms(self.seed, self.ints[NUMBER, :b], self.state.seq_lens[:b], self.gamma + 1)

    def first_token(self, row: int, logits: Tensor, position: int) -> Tensor:
        """The token [1] that ``logits`` [1, V] at the prompt's last ``position`` give ``row``."""
        here = slice(row, row + 1)
        at = torch.full((1,), position, dtype=torch.int64, device=logits.device)
        noise = uniforms(self.seed, self.ints[NUMBER, here], at, 1)
        return sample(logits, self._rows(here), noise[:, 0, BONUS])

    def picker(self, b: int, gather: Callable[[Tensor], Tensor]) -> Picker:
        """What chooses the drafts of the first ``b`` rows; ``gather`` puts a rank's columns of logits together."""
        return Picker(self.rows(b), self.noise(b)[:, :, DRAFT], gather, self.draft_probs[:b])

    def accept_noise(self, b: int) -> tuple[Tensor, Tensor]:
        """[b, γ] for accepting and [b, γ + 1] for the bonus."""
        noise = self.noise(b)
        return noise[:, : self.gamma, ACCEPT], noise[..., BONUS]

    def _rows(self, which: slice) -> SamplingRows:
        return SamplingRows(
            temperature=self.floats[TEMPERATURE, which],
            top_k=self.ints[TOP_K, which],
            top_p=self.floats[TOP_P, which],
            is_greedy=self.ints[GREEDY, which] > 0,
            all_greedy=False,
            cuts=self.cuts,
        )


class Picker:
    """Draws each draft from the corrected logits of its slot, and keeps what it drew from."""

    def __init__(
        self, rows: SamplingRows, noise: Tensor, gather: Callable[[Tensor], Tensor], draft_probs: Tensor
    ) -> None:
        self.rows, self.noise, self.gather, self.draft_probs = rows, noise, gather, draft_probs

    def __call__(self, slot: int, logits: Tensor) -> Tensor:
        """Tokens [B] int64 of ``slot`` 0..γ−1 from this rank's columns ``logits`` [B, V_local]."""
        return sample(self.gather(logits), self.rows, self.noise[:, slot], self.draft_probs[:, slot])

    def took(self, tokens: Tensor) -> None:
        """For drafters that draw nothing: all mass on the ``tokens`` [B, γ] that they found."""
        self.draft_probs.zero_().scatter_(-1, tokens[..., None], 1.0)
