"""One request on its way through the decode loop, and the endless workload that a measured run draws from. Host side only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.config.shipped import TEXT_KINDS
from dspark_lab.engine.results import RoundDetail
from dspark_lab.errors import LabError
from dspark_lab.models.text import held_out
from dspark_lab.spec.sampling import Sampling


@dataclass(kw_only=True)
class Request:
    """Prompt, committed tokens and the lengths of every round."""

    prompt: list[int]
    max_new_tokens: int
    number: int = 0
    """Which request of the workload: names its random numbers."""
    sampling: Sampling | None = None
    """None: as the config says."""
    stop_token_ids: tuple[int, ...] = ()
    slot: int = -1
    seq_len: int = 0
    """Positions in the caches: where the anchor will sit."""
    new_tokens: list[int] = field(default_factory=list)
    """Committed after the prompt: the prefill's token, then every round's; the last one is the anchor."""
    acceptance_lengths: list[int] = field(default_factory=list)
    proposal_lengths: list[int] = field(default_factory=list)
    rounds: list[RoundDetail] = field(default_factory=list)
    """Of every round, where the engine keeps them."""
    stopped: bool = False
    """A stop token was committed: the last of `new_tokens`."""

    @property
    def limit(self) -> int:
        """Rounds start only below this length."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def finished(self) -> bool:
        """Rounds run while Σ accept_length < max_new_tokens, and until a stop token."""
        return self.stopped or sum(self.acceptance_lengths) >= self.max_new_tokens

    @property
    def ended(self) -> str:
        """``stop`` where the output ends in a stop token, ``length`` where it was cut at ``max_new_tokens``, else ``running``."""
        if self.stopped and len(self.new_tokens) <= self.max_new_tokens:
            return "stop"
        return "length" if self.finished else "running"

    def commit(self, tokens: list[int]) -> None:
        """Adds what the prefill or a round committed; the device has cut it behind the first stop token."""
        self.new_tokens += tokens
        self.stopped = bool(tokens) and tokens[-1] in self.stop_token_ids

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens, cut to ``max_new_tokens``; the lengths of the rounds are not cut."""
        return self.prompt + self.new_tokens[: self.max_new_tokens]


def check_limit(max_new_tokens: object) -> int:
    """``max_new_tokens`` as it is. Raises `LabError` unless it is a whole number of at least 1."""
    if not is_int(max_new_tokens) or max_new_tokens < 1:
        raise LabError(
            f"max_new_tokens={shown(max_new_tokens)} is not a whole number of at least 1; "
            "None takes the config's max_new_tokens."
        )
    return max_new_tokens


def check_config(cfg: object) -> None:
    """Raises `LabError` for what is no config."""
    if not isinstance(cfg, LabConfig):
        raise LabError(f"cfg={shown(cfg)} is no LabConfig; lab.preset, lab.shipped and lab.load_pair make one.")


def check_prompts(prompts: object) -> None:
    """Raises `LabError` unless ``prompts`` is a list of lists; a single prompt is told what to be."""
    if not isinstance(prompts, list | tuple):
        raise LabError(f"prompts={shown(prompts)} is not a list of prompts; give lists of token ids, such as [[1, 2]].")
    for prompt in prompts:
        if not isinstance(prompt, list | tuple):
            raise LabError(
                f"prompts={shown(prompts)} holds {shown(prompt)}, which is not a list of token ids; "
                "a single prompt is a list in a list, such as [[1, 2]]."
            )


def check_prompt(prompt: list[int], cfg: LabConfig, *, max_new_tokens: int) -> None:
    """Raises `LabError` where a prompt is empty, has an id that is none of the vocabulary, or cannot fit into the context."""
    vocab = cfg.model.target.vocab_size
    if not prompt:
        raise LabError("an empty prompt has nothing to continue; give at least one token id.")
    for token in prompt:
        if not is_int(token) and not isinstance(token, np.integer):
            raise LabError(f"prompt id {shown(token)} is not a whole number; legal ids are 0 to {vocab - 1}.")
        if not 0 <= token < vocab:
            raise LabError(f"prompt id {shown(token)} is beyond the vocabulary: legal ids are 0 to {vocab - 1}.")
    need = len(prompt) + max_new_tokens
    if need > cfg.model.context_len:
        raise LabError(
            f"a prompt of {len(prompt)} with max_new_tokens={max_new_tokens} needs {need} positions, over "
            f"context_len={cfg.model.context_len}; shorten the prompt or lower max_new_tokens to at most "
            f"{max(cfg.model.context_len - need + max_new_tokens, 0)}."
        )


def workload(cfg: LabConfig, *, first: int = 0, stride: int = 1) -> Iterator[Request]:
    """Requests without end: prompts of ``prompt_len`` ids, random or of the text that the config names, the same for a seed
    whatever else is toggled.

    ``first`` and ``stride``: which of them; a slot of a batch takes every ``batch_size``-th, so that what runs in it does
    not depend on when other slots get free, or on which rank they are.
    """
    prompt_of = _random_prompts(cfg) if cfg.engine.text == "random" else _text_prompts(cfg)
    index = first
    while True:
        yield Request(
            prompt=prompt_of(index),
            max_new_tokens=cfg.engine.max_new_tokens,
            number=index,
            stop_token_ids=cfg.engine.stop_token_ids,
        )
        index += stride


def _random_prompts(cfg: LabConfig) -> Callable[[int], list[int]]:
    vocab, mask = cfg.model.target.vocab_size, cfg.model.drafter.mask_token_id

    def prompt(index: int) -> list[int]:
        rng = np.random.default_rng([cfg.seed, index])
        ids = rng.integers(0, vocab - 1, cfg.engine.prompt_len)
        ids[ids >= mask] += 1
        return ids.tolist()

    return prompt


def _text_prompts(cfg: LabConfig) -> Callable[[int], list[int]]:
    """The last ``prompt_len`` bytes of held-out prompts, kinds in turn where there are several."""
    kinds = TEXT_KINDS if cfg.engine.text == "mixed" else (cfg.engine.text,)
    texts = [held_out(kind) for kind in kinds]

    def prompt(index: int) -> list[int]:
        some = texts[index % len(texts)]
        chosen = np.random.default_rng([cfg.seed, index]).integers(len(some))
        return some[chosen][-cfg.engine.prompt_len :]

    return prompt
