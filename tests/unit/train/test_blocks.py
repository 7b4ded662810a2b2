"""Training computes what the decode path computes: the same tokens in, the same logits out, for every kind of drafter."""

from __future__ import annotations

import pytest
import torch

from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.models.weights import init_random
from dspark_lab.train.anchors import Anchors
from dspark_lab.train.blocks import block_forward
from dspark_lab.train.forward import causal_forward

LENGTH = 20
KINDS = [
    {},
    {"markov_head": "gated", "backbone": "moe"},
    {"markov_head": "rnn"},
    {"markov_head": "none", "confidence": True},
    {"drafter": "dflash"},
    {"drafter": "eagle3"},
    {"drafter": "eagle3", "backbone": "moe"},
]


def rows(ids: torch.Tensor, start: int, *, block: bool) -> ForwardBatch:
    n = len(ids)
    positions = torch.arange(start, start + n)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=1,
        num_tokens_per_req=n,
        input_ids=ids,
        positions=positions,
        req_slots=torch.tensor([0]),
        key_limits=torch.full((n,), start + n) if block else positions + 1,
        max_keys=start + n,
        num_token_non_padded_cpu=n,
    )


def test_causal_forward_is_the_decode_path(target):
    tokens = torch.randint(0, 47, (2, LENGTH))
    states = causal_forward(target.model, tokens, (-1, 1, 2))
    for row in range(2):
        out = target(rows(tokens[row], 0, block=False), target.new_cache(1, LENGTH), capture_layers=(-1, 1, 2))
        assert (out.hidden - states.hidden[row]).abs().max() < 1e-5
        assert (out.aux - states.aux[row]).abs().max() < 1e-5


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_blocks_are_what_the_decode_path_drafts(changes, target, model):
    """The blocks are continued by what decoding drafted, so that teacher forcing sees the same tokens."""
    cfg = model(**changes)
    drafter = (EagleDrafter if cfg.drafter.drafter_kind == "eagle3" else Drafter)(cfg)
    init_random(drafter, 5)
    gamma, anchors = cfg.drafter.block_size, [1, 6, 13]
    tokens = torch.randint(0, 47, (1, LENGTH))
    with torch.inference_mode():
        for anchor in anchors:
            out = target(
                rows(tokens[0, :anchor], 0, block=False),
                target.new_cache(1, 64),
                capture_layers=cfg.drafter.target_layer_ids,
            )
            cache, slots = drafter.new_cache(1, 64), torch.zeros(anchor, dtype=torch.int64)
            context = (tokens[0, :anchor],) if isinstance(drafter, EagleDrafter) else ()
            drafter.write_context(out.aux, slots, torch.arange(anchor), cache, *context)
            ids = torch.tensor([int(tokens[0, anchor])] + [47] * (drafter.query_len - 1))
            proposal = drafter.draft(rows(ids, anchor, block=True), cache, tokens[:, anchor])
            continued = torch.cat((tokens[:, : anchor + 1], proposal.draft_tokens, tokens[:, :4]), dim=1)
            aux = causal_forward(target.model, continued, cfg.drafter.target_layer_ids).aux
            blocks = Anchors(
                positions=torch.tensor([[anchor, 0]]),
                kept=torch.tensor([[True, False]]),
                mask=torch.ones(1, 2, gamma, dtype=torch.bool),
            )
            trained = block_forward(drafter, continued, aux, blocks)
            assert (trained.logits[0, 0] - proposal.corrected_logits[0]).abs().max() < 1e-4
            if proposal.confidence is not None:
                assert (trained.confidence_logits[0, 0].sigmoid() - proposal.confidence[0]).abs().max() < 1e-5


def test_a_block_sees_nothing_behind_its_anchor(target, model):
    cfg = model()
    drafter = Drafter(cfg)
    init_random(drafter, 5)
    tokens = torch.randint(0, 47, (1, LENGTH))
    aux = torch.randn(1, LENGTH, len(cfg.drafter.target_layer_ids) * 32)
    one = torch.ones(1, 1, 4, dtype=torch.bool)
    blocks = Anchors(positions=torch.tensor([[7]]), kept=one[..., 0], mask=one)
    with torch.no_grad():
        before = block_forward(drafter, tokens, aux, blocks).logits
        aux[:, 7:] = 9.0
        assert torch.equal(block_forward(drafter, tokens, aux, blocks).logits, before)
        aux[:, 6] = 9.0
        assert not torch.equal(block_forward(drafter, tokens, aux, blocks).logits, before)
