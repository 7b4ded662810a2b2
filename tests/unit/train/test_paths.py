"""The exact accept length of a drawn text against chain sampling itself, drawn many times over every text there can be."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_kernels.sampling.reference import chain_accept, draw
from dspark_lab.config import LabConfig
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, ModelConfig
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.models.weights import build
from dspark_lab.train.anchors import Anchors
from dspark_lab.train.blocks import block_forward
from dspark_lab.train.forward import causal_forward
from dspark_lab.train.paths import path_acceptance, total

V, GAMMA, LENGTH, PROMPT = 4, 2, 6, 1
STARTS = range(PROMPT, LENGTH - GAMMA)
NUM_DRAWS = 20_000
KINDS = {
    "vanilla": {"markov_rank": 4},
    "rnn": {"markov_rank": 4, "markov_head": "rnn"},
    "dflash": {"markov_rank": 0, "markov_head": "none", "drafter_kind": "dflash", "sample_from_anchor": False},
    "eagle3": {"markov_rank": 0, "markov_head": "none", "drafter_kind": "eagle3"},
}


def pair(kind: str) -> tuple[Target, Drafter | EagleDrafter]:
    shape = DecoderConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=16
    )  # fmt: skip
    draft = DecoderConfig(**{**shape.__dict__, "num_hidden_layers": 1})
    drafter = DrafterConfig(
        block_size=GAMMA, target_layer_ids=(0, 1), mask_token_id=3, enable_confidence_head=False, **KINDS[kind]
    )
    made = build(LabConfig(preset="four", model=ModelConfig(target=shape, draft=draft, drafter=drafter), seed=3))
    return made  # pyright: ignore[reportReturnType]


def tables(target: Target, drafter: Drafter | EagleDrafter) -> tuple[Tensor, Tensor, Tensor]:
    """All texts [N, S] whose first token is 0, and p_t [N, S, V] and p_d [N, A, γ, V] at every place of each."""
    texts = torch.tensor([(0, *rest) for rest in itertools.product(range(V), repeat=LENGTH - 1)])
    positions = torch.tensor(STARTS).expand(len(texts), -1)
    anchors = Anchors(
        positions=positions,
        kept=torch.ones_like(positions, dtype=torch.bool),
        mask=torch.ones(*positions.shape, GAMMA, dtype=torch.bool),
    )
    states = causal_forward(target.model, texts, drafter.drafter_cfg.target_layer_ids)
    p_d = block_forward(drafter, texts, states.aux, anchors).logits.double().softmax(dim=-1)
    return texts, target.local_logits(states.hidden).double().softmax(dim=-1), p_d


def number(texts: Tensor) -> Tensor:
    """Where each of ``texts`` stands in the tables; what has not been drawn yet is 0 and changes nothing before it."""
    return (texts[:, 1:] * torch.tensor([V**i for i in reversed(range(LENGTH - 1))])).sum(dim=1)


def sampled(p_t: Tensor, p_d: Tensor, uniform: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Texts [N, S] by speculative decoding, and [N, 1 + γ]: counted rounds, and how many of them accepted draft k."""
    texts = torch.zeros(NUM_DRAWS, LENGTH + GAMMA + 1, dtype=torch.int64)
    texts[:, PROMPT] = draw(p_t[number(texts[:, :LENGTH]), PROMPT - 1], uniform(NUM_DRAWS))
    at, counts = torch.full((NUM_DRAWS,), PROMPT), torch.zeros(NUM_DRAWS, 1 + GAMMA)
    for start in STARTS:
        rows = torch.nonzero(at == start).squeeze(1)
        text = texts[rows, :LENGTH].clone()
        text[:, start + 1 :] = 0
        drafted = []
        for k in range(GAMMA):
            drafted.append(p_d[number(text), start - PROMPT, k])
            text[:, start + 1 + k] = draw(drafted[-1], uniform(len(rows)))
        truth = p_t[number(text), start : start + GAMMA + 1]
        drafts = text[:, start + 1 : start + 1 + GAMMA]
        out = chain_accept(
            drafts, torch.stack(drafted, dim=1), truth, torch.full((len(rows),), GAMMA),
            accept_noise=uniform(len(rows), GAMMA), bonus_noise=uniform(len(rows), GAMMA + 1),
        )  # fmt: skip
        accepted = out.num_accepted
        counts[rows, 0] += 1
        counts[rows, 1:] += (accepted[:, None] > torch.arange(GAMMA)).float()
        columns = start + 1 + torch.arange(GAMMA + 1)
        texts[rows[:, None], columns] = out.out_tokens
        at[rows] = start + 1 + accepted
    return finished(texts[:, :LENGTH], at, p_t, uniform), counts


def finished(texts: Tensor, at: Tensor, p_t: Tensor, uniform: Callable[..., Tensor]) -> Tensor:
    """What rounds that are not counted would write: each text goes on from its anchor ``at`` by the target alone."""
    texts = texts.clone()
    for i in range(PROMPT, LENGTH):
        drawn = draw(p_t[number(torch.where(torch.arange(LENGTH) < i, texts, 0)), i - 1], uniform(len(texts)))
        texts[:, i] = torch.where(at < i, drawn, texts[:, i])
    return texts


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_path_acceptance_is_what_chain_sampling_accepts(kind):
    generator = torch.Generator().manual_seed(11)
    target, drafter = pair(kind)
    texts, p_t, p_d = tables(target, drafter)
    written, counts = sampled(p_t, p_d, lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64))
    exact = path_acceptance(target, drafter, texts, PROMPT)
    of_text = torch.tensor([[e.num_rounds, *e.accepted] for e in exact])[number(written)]
    off = (counts - of_text).double()
    assert (off.mean(dim=0).abs() < 4 * off.std(dim=0) / NUM_DRAWS**0.5).all()
    together = total([exact[i] for i in number(written).tolist()])
    drawn = 1 + counts[:, 1:].sum() / counts[:, 0].sum()
    assert together.accept_length == pytest.approx(float(drawn), abs=0.02)
    assert together.accept_length == pytest.approx(1 + sum(together.by_position))


@torch.no_grad()
def test_it_holds_for_each_text_and_not_only_on_average():
    generator = torch.Generator().manual_seed(12)
    target, drafter = pair("vanilla")
    texts, p_t, p_d = tables(target, drafter)
    written, counts = sampled(p_t, p_d, lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64))
    exact = path_acceptance(target, drafter, texts, PROMPT)
    often = np.bincount(number(written).numpy(), minlength=len(texts)).argsort()[-12:]
    for i in often:
        here = counts[number(written) == int(i)].double()
        assert len(here) > 50
        expected = torch.tensor([exact[i].num_rounds, *exact[i].accepted])
        spread = expected.sqrt() / len(here) ** 0.5  # of counts: more than theirs, which few draws tell badly
        assert ((here.mean(dim=0) - expected).abs() < 4 * spread).all()
