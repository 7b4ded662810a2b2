"""`generate`: prompts in, tokens out, with the lengths of every round; and plain greedy decoding to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark_lab.config import LabConfig
from dspark_lab.device import resolve
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.request import Request, check_limit, check_prompt, check_prompts
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.weights import build


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The output of one prompt."""

    tokens: list[int]
    """Prompt and new tokens."""
    acceptance_lengths: list[int]
    """Committed tokens of each round, bonus included; not cut at ``max_new_tokens``."""
    proposal_lengths: list[int]
    """Drafts verified in each round, 0..γ."""


@torch.inference_mode()
def generate(
    cfg: LabConfig,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | None = None,
    models: tuple[Target, Drafter] | None = None,
) -> list[Generated]:
    """Continues each prompt by speculative decoding, greedily and losslessly; batches of ``batch_size``, ragged prompts allowed.

    ``models`` are built from ``cfg`` where not given. Raises `LabError` before the first step for a prompt that cannot run
    and for ``max_new_tokens`` below 1 (None: the config's).
    """
    limit = cfg.engine.max_new_tokens if max_new_tokens is None else check_limit(max_new_tokens)
    check_prompts(prompts)
    for prompt in prompts:
        check_prompt(prompt, cfg, max_new_tokens=limit)
    device = resolve(cfg.engine.device)
    target, drafter = models or build(cfg, device)
    engine = DecodeEngine(cfg, target, drafter, device)
    requests = [Request(prompt=[int(t) for t in p], max_new_tokens=limit) for p in prompts]
    waiting = list(reversed(requests))
    while waiting or engine.active:
        while waiting and len(engine.active) < cfg.engine.batch_size:
            engine.join(waiting.pop())
        engine.step()
    engine.drain()
    return [
        Generated(tokens=r.tokens, acceptance_lengths=r.acceptance_lengths, proposal_lengths=r.proposal_lengths)
        for r in requests
    ]


@torch.inference_mode()
def generate_plain(cfg: LabConfig, prompt: list[int], *, target: Target, max_new_tokens: int) -> list[int]:
    """One token a forward, no drafter: what speculative output must equal. Returns prompt and new tokens."""
    device = next(target.parameters()).device
    cache = target.new_cache(1, cfg.model.context_len)
    tokens, new = list(prompt), list(prompt)
    for _ in range(max_new_tokens):
        start = len(tokens) - len(new)
        positions = torch.arange(start, len(tokens), device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            num_tokens_per_req=len(new),
            input_ids=torch.tensor(new, device=device),
            positions=positions,
            req_slots=torch.zeros(1, dtype=torch.int64, device=device),
            key_limits=positions + 1,
            max_keys=len(tokens),
            num_token_non_padded=None,
            num_token_non_padded_cpu=len(new),
        )
        out = target.forward(batch, cache, capture_layers=())
        new = [int(target.argmax(out.hidden[-1:]).item())]
        tokens += new
    return tokens
