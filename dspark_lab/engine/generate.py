"""`generate`: prompts in, tokens out, with the lengths of every round; and plain greedy decoding to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark_lab.config import LabConfig
from dspark_lab.device import resolve
from dspark_lab.engine.decode import DecodeEngine, check_runnable
from dspark_lab.engine.request import Request, check_limit, check_prompt, check_prompts
from dspark_lab.ep.groups import ParallelGroups, process_groups
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.kinds import AnyDrafter
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
    models: tuple[Target, AnyDrafter] | None = None,
    groups: ParallelGroups | None = None,
) -> list[Generated]:
    """Continues each prompt by speculative decoding, greedily and losslessly; batches of ``batch_size``, ragged prompts allowed.

    Where the config needs several ranks, each calls this with all prompts, in their process group, and gets all outputs.

    ``models`` are built from ``cfg`` where not given, and so are the ``groups`` of its ranks. Raises `LabError` before the first step for a prompt that cannot run
    and for ``max_new_tokens`` below 1 (None: the config's).
    """
    limit = cfg.engine.max_new_tokens if max_new_tokens is None else check_limit(max_new_tokens)
    check_prompts(prompts)
    for prompt in prompts:
        check_prompt(prompt, cfg, max_new_tokens=limit)
    device = resolve(cfg.engine.device)
    check_runnable(cfg)
    groups = groups or process_groups(cfg.parallel, device)
    engine = DecodeEngine(cfg, *(models or build(cfg, device, groups)), device, groups=groups)
    mine = [i for i in range(len(prompts)) if i % cfg.engine.batch_size in engine.slots]
    requests = {i: Request(prompt=[int(t) for t in prompts[i]], max_new_tokens=limit) for i in mine}
    waiting = iter(requests.values())
    engine.admit(lambda _: next(waiting, None))
    while engine.any_active():
        engine.step()
        engine.admit(lambda _: next(waiting, None))
    engine.drain()
    done = [
        (i, Generated(tokens=r.tokens, acceptance_lengths=r.acceptance_lengths, proposal_lengths=r.proposal_lengths))
        for i, r in requests.items()
    ]
    return [out for _, out in sorted(engine.of_all_replicas(done), key=lambda pair: pair[0])]


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
