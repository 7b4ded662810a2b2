"""What a schedule would have earned: rounds of real texts under any rule and cost table, without running a model again.

A text that the target wrote fixes what a round accepts from each start: draft k survives with a known chance, whatever was
verified before. So a rule can be rehearsed exactly in distribution: it chooses lengths, the text says what is accepted, the
table what the step costs. R requests, γ drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_lab.config.kinds import shown
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import Costs
from dspark_lab.plan.schedule import early_stop, survival
from dspark_lab.plan.scheduler import LAG, Scheduler

Rule = Callable[[int, np.ndarray, list[tuple[int, int]]], np.ndarray]
"""(round, confidence [R, γ], names of the rows) to drafts to verify [R]."""


@dataclass(frozen=True, kw_only=True)
class TextPath:
    """One text: what a round accepts from each of its A starts."""

    survival: np.ndarray
    """[A, γ] chance that the first k drafts are accepted, never rising along a block."""
    confidence_logits: np.ndarray | None = None
    """[A, γ] of the drafter before the sigmoid; None without a confidence head."""

    def confidence(self, scales: np.ndarray | None = None) -> np.ndarray:
        """[A, γ] conditional, with the temperatures ``scales`` [γ] of an STS table where given."""
        if self.confidence_logits is None:
            raise LabError("this drafter has no confidence head, so there is nothing to schedule by.")
        z = self.confidence_logits if scales is None else self.confidence_logits / scales
        return 1.0 / (1.0 + np.exp(-z))


@dataclass(frozen=True, kw_only=True)
class Earned:
    """One rehearsal."""

    num_tokens: int
    seconds: float
    num_verified: int
    """Drafts."""
    num_rounds: int
    """Of requests: R a step."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def accept_length(self) -> float:
        return self.num_tokens / self.num_rounds

    @property
    def verify_len(self) -> float:
        """Rows verified a request and round, anchor counted."""
        return 1 + self.num_verified / self.num_rounds


def rehearse(
    texts: Sequence[TextPath],
    costs: Costs,
    rule: Rule,
    *,
    num_requests: int,
    num_steps: int,
    seed: int,
    scales: np.ndarray | None = None,
) -> Earned:
    """``num_steps`` steps of ``num_requests`` requests, each on a text drawn with ``seed``, another one where it ends.

    The same seed gives every rule the same texts and the same luck a request and step, so that rules compare in pairs. The
    first `LAG` steps are run and not counted: no confidence has come back yet, which a server meets once.
    """
    if not texts:
        raise LabError("there are no texts to rehearse on.")
    rng = np.random.default_rng(seed)
    confidence = [t.confidence(scales) for t in texts]
    all_steps = num_steps + LAG
    queue = rng.integers(0, len(texts), (num_requests, all_steps + 1))
    luck = rng.random((all_steps, num_requests))
    first = rng.random(num_requests)  # requests do not all start at once
    at = queue[:, 0].copy()
    start = np.array([int(f * len(texts[t].survival)) for f, t in zip(first, at, strict=True)])
    generation = np.zeros(num_requests, dtype=np.int64)
    tokens = verified = 0
    seconds = 0.0
    for step in range(all_steps):
        if step == LAG:
            tokens, verified, seconds = 0, 0, 0.0
        present = np.stack([confidence[t][s] for t, s in zip(at, start, strict=True)])
        chances = np.stack([texts[t].survival[s] for t, s in zip(at, start, strict=True)])
        lengths = np.asarray(rule(step, present, [(r, int(generation[r])) for r in range(num_requests)]))
        accepted = np.minimum((luck[step][:, None] < chances).sum(axis=1), lengths)
        committed = accepted + 1
        tokens += int(committed.sum())
        verified += int(lengths.sum())
        seconds += float(costs.seconds_at(num_requests, [num_requests + int(lengths.sum())])[0])
        start = start + committed
        for r in np.flatnonzero(start >= [len(texts[t].survival) for t in at]):
            generation[r] += 1
            at[r], start[r] = queue[r, generation[r]], 0
    return Earned(num_tokens=tokens, seconds=seconds, num_verified=verified, num_rounds=num_steps * num_requests)


def check_texts(texts: Sequence[TextPath]) -> None:
    """Raises `LabError` for what is no list of texts, for one without a start, and for texts of unlike γ."""
    if not isinstance(texts, Sequence) or not all(isinstance(t, TextPath) for t in texts):
        raise LabError(
            f"texts={shown(texts)} is no list of TextPath; train.paths.text_paths makes them of what a target wrote."
        )
    gamma = np.shape(texts[0].survival)[1:]
    for t in texts:
        shape, logits = np.shape(t.survival), t.confidence_logits
        if len(shape) != 2 or not shape[0] or shape[1:] != gamma:
            raise LabError(
                f"a text has survival of the shape {shape}; it is [starts, {', '.join(map(str, gamma))}], of one start at least."
            )
        if logits is not None and np.shape(logits) != shape:
            raise LabError(
                f"a text has confidence_logits of the shape {np.shape(logits)} and survival of {shape}; they are alike."
            )
        if not ((t.survival >= 0) & (t.survival <= 1)).all():
            raise LabError(
                "a text has survival that is not within 0 to 1; it is the chance that the first drafts are accepted."
            )


def check_scales(scales: object, gamma: int) -> np.ndarray:
    """``scales`` as [γ] floats. Raises `LabError` where they are no temperatures."""
    try:
        found = np.asarray(scales, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.shape != (gamma,) or not (np.isfinite(found) & (found > 0)).all():
        raise LabError(
            f"scales={shown(scales)} are not {gamma} finite numbers above 0; lab.load_sts(path).scales(...) gives them."
        )
    return found


def fixed(length: int) -> Rule:
    """Every request verifies ``length`` drafts."""
    return lambda _, confidence, __: np.full(len(confidence), length)


def deployed(costs: Costs, *, block_size: int, max_requests: int) -> Rule:
    """`Scheduler`: the budget of confidences two rounds old, split by the present ones."""
    scheduler = Scheduler(costs, block_size=block_size, max_requests=max_requests)
    return lambda step, confidence, names: scheduler.schedule(step, names, confidence).lengths


def stopping(costs: Costs) -> Rule:
    """Algorithm 1: admits drafts until one does not pay."""
    return lambda _, confidence, __: early_stop(survival(confidence), costs).lengths
