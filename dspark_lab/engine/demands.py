"""`Demands`: what the requests of an engine may ask for. It decides which work a round launches, and so what graphs hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_lab.config import LabConfig
from dspark_lab.spec.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Of all requests together; one that asks for less runs along."""

    sampled: bool = False
    """Some request samples; greedy ones beside it are rows with all their mass on one token."""
    cuts: bool = False
    """Some request has a top-k or a top-p, which cost a search or a sort."""
    stop_token_ids: tuple[int, ...] = ()
    keep_rounds: bool = False
    """Drafts and confidences come to the host beside what was committed."""
    at_limit: bool = False
    """Some request can reach the end of its context within a block: proposals are cut there."""

    @classmethod
    def of(
        cls,
        cfg: LabConfig,
        sampling: Sequence[Sampling] | None = None,
        *,
        keep_rounds: bool = False,
        longest: int | None = None,
    ) -> Demands:
        """Of requests that sample as ``sampling`` says (None: all as ``cfg`` does) and are at most ``longest`` tokens long
        with what they generate (None: as ``cfg`` says)."""
        each = [sampling_of(cfg)] if sampling is None else sampling
        e = cfg.engine
        longest = e.prompt_len + e.max_new_tokens if longest is None else longest
        return cls(
            sampled=any(not s.is_greedy for s in each),
            cuts=any(not s.is_greedy and (s.top_k > 0 or s.top_p < 1) for s in each),
            stop_token_ids=e.stop_token_ids,
            keep_rounds=keep_rounds,
            at_limit=longest + cfg.gamma + 1 > cfg.model.context_len,
        )


def sampling_of(cfg: LabConfig) -> Sampling:
    """How a request of ``cfg`` samples that does not say itself."""
    e = cfg.engine
    return Sampling(temperature=e.temperature, top_k=e.top_k, top_p=e.top_p)
