"""`generate`: prompts in, tokens out, with the lengths of every round; and plain greedy decoding to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import shown
from dspark_lab.device import resolve
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.demands import Demands, sampling_of
from dspark_lab.engine.request import Request, check_config, check_limit, check_prompt, check_prompts
from dspark_lab.engine.results import RoundDetail
from dspark_lab.engine.runnable import check_runnable
from dspark_lab.ep.groups import ParallelGroups, process_groups
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.kinds import AnyDrafter
from dspark_lab.models.weights import build
from dspark_lab.spec.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The output of one prompt."""

    tokens: list[int]
    """Prompt and new tokens."""
    acceptance_lengths: list[int]
    """Committed tokens of each round, bonus included; not cut at ``max_new_tokens``."""
    proposal_lengths: list[int]
    """Drafts verified in each round, 0..γ."""
    ended: str = "length"
    """``stop``: the last token is a stop token; ``length``: cut at ``max_new_tokens``."""
    rounds: list[RoundDetail] = field(default_factory=list)
    """Each round's drafts and confidences, where `generate` was asked to keep them."""


@torch.inference_mode()
def generate(
    cfg: LabConfig,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | None = None,
    sampling: Sequence[Sampling] | None = None,
    keep_rounds: bool = False,
    models: tuple[Target, AnyDrafter] | None = None,
    groups: ParallelGroups | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Generated]:
    """Continues each prompt by speculative decoding, losslessly; batches of ``batch_size``, ragged prompts allowed.

    ``sampling``: one a prompt, greedy ones among them; by default all as the config says. What a prompt draws goes by the
    config's ``seed`` and its place in ``prompts``, not by what runs beside it. ``keep_rounds``: also each round's drafts and
    confidences. ``on_progress(done, all)`` counts this rank's new tokens after each round; what it raises ends the generation.
    Where the config needs several ranks, each calls this with all prompts, in their process group, and gets all outputs.

    ``models`` are built from ``cfg`` where not given, and so are the ``groups`` of its ranks. Raises `LabError` before the first step for a prompt that cannot run
    and for ``max_new_tokens`` below 1 (None: the config's).
    """
    check_config(cfg)
    limit = cfg.engine.max_new_tokens if max_new_tokens is None else check_limit(max_new_tokens)
    check_prompts(prompts)
    for prompt in prompts:
        check_prompt(prompt, cfg, max_new_tokens=limit)
    each = _sampling_of_each(cfg, sampling, len(prompts))
    device = resolve(cfg.engine.device)
    check_runnable(cfg)
    groups = groups or process_groups(cfg.parallel, device)
    longest = max((len(p) for p in prompts), default=0) + limit
    demands = Demands.of(cfg, each, keep_rounds=keep_rounds, longest=longest)
    engine = DecodeEngine(cfg, *(models or build(cfg, device, groups)), device, groups=groups, demands=demands)
    mine = [i for i in range(len(prompts)) if i % cfg.engine.batch_size in engine.slots]
    requests = {
        i: Request(prompt=[int(t) for t in prompts[i]], max_new_tokens=limit, number=i, sampling=each[i]) for i in mine
    }
    waiting = iter(requests.values())
    engine.admit(lambda _: next(waiting, None))
    while engine.any_active():
        engine.step()
        engine.admit(lambda _: next(waiting, None))
        if on_progress is not None:
            on_progress(sum(min(len(r.new_tokens), limit) for r in requests.values()), limit * len(requests))
    engine.drain()
    done = [
        (
            i,
            Generated(
                tokens=r.tokens,
                acceptance_lengths=r.acceptance_lengths,
                proposal_lengths=r.proposal_lengths,
                ended=r.ended,
                rounds=r.rounds,
            ),
        )
        for i, r in requests.items()
    ]
    return [out for _, out in sorted(engine.of_all_replicas(done), key=lambda pair: pair[0])]


def _sampling_of_each(cfg: LabConfig, sampling: Sequence[Sampling] | None, num_prompts: int) -> list[Sampling]:
    if sampling is None:
        return [sampling_of(cfg)] * num_prompts
    if not isinstance(sampling, Sequence):
        raise LabError(f"sampling={shown(sampling)} is no list of lab.Sampling; give one a prompt.")
    for one in sampling:
        if not isinstance(one, Sampling):
            raise LabError(f"sampling holds {shown(one)}, which is no lab.Sampling; give one a prompt.")
    if len(sampling) != num_prompts:
        raise LabError(f"sampling has {len(sampling)} settings and there are {num_prompts} prompts; give one a prompt.")
    e = cfg.engine
    others = [s.temperature for s in sampling if s.temperature != e.temperature]
    if e.sts_path is not None and others:
        raise LabError(
            f"sampling has temperature={others[0]!r}, and sts_path calibrates confidences for the config's temperature={e.temperature!r}; "
            "acceptance is another event at each, so sample alike or choose sts_path=None."
        )
    return list(sampling)


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
