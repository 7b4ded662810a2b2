"""Markov and confidence heads against loops written from the formulas; every head travels through a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark_lab.models.checkpoint import load_pair
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.save import save_drafter, save_target
from dspark_lab.models.weights import build, init_random

HEADS = ("none", "vanilla", "gated", "rnn")


def drafter_of(plain, head: str, **changes) -> tuple[Drafter, object]:
    model = plain.model_config()
    rank = 0 if head == "none" else 8
    fields = {"markov_head": head, "markov_rank": rank, "confidence_head_with_markov": rank > 0} | changes
    model = replace(model, drafter=replace(model.drafter, **fields))
    drafter = Drafter(model)
    init_random(drafter, 1)
    return drafter, model


def by_hand(d: Drafter, head: str, hidden: torch.Tensor, anchor: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Tokens, corrected logits [γ, V] and confidence [γ] of one block, a slot at a time."""
    w = {name: p.detach() for name, p in d.named_parameters()}
    x, s, tokens, logits, confidence = anchor, torch.zeros(8), [], [], []
    for h in hidden:
        u, e = w["lm_head.weight"] @ h, torch.zeros(0)
        if head != "none":
            e = w["markov_head.markov_w1.weight"][x]
            w2 = w["markov_head.markov_w2.weight"]
        if head == "vanilla":
            u = u + w2 @ e
        elif head == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat((h, e)) + w["markov_head.gate_proj.bias"]
            u = u + w2 @ (e / (1 + (-gate).exp()))
        elif head == "rnn":
            z = w["markov_head.joint_proj.weight"] @ torch.cat((s, e, h)) + w["markov_head.joint_proj.bias"]
            g, c, o = z[:8], z[8:16], z[16:]
            keep = 1 / (1 + (-g).exp())
            s = keep * s + (1 - keep) * c.tanh()
            u = u + w2 @ o.tanh()
        features = torch.cat((h, e)) if d.confidence_with_markov else h
        c = w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]
        confidence.append(1 / (1 + (-c).exp()))
        x = int(u.argmax())
        tokens.append(x)
        logits.append(u)
    return tokens, torch.stack(logits), torch.stack(confidence)


@pytest.mark.parametrize(
    ("head", "with_markov"), [(h, w) for h in HEADS for w in (True, False) if h != "none" or not w]
)
def test_heads_follow_their_formulas(head, with_markov, plain):
    d, _ = drafter_of(plain, head, confidence_head_with_markov=with_markov)
    hidden, anchors = torch.randn(3, 4, 32), torch.tensor([5, 0, 62])
    proposal = d.propose(hidden, anchors)
    for row in range(3):
        tokens, logits, confidence = by_hand(d, head, hidden[row], int(anchors[row]))
        assert proposal.draft_tokens[row].tolist() == tokens
        assert (proposal.corrected_logits[row] - logits).abs().max() < 1e-4
        assert (proposal.confidence[row] - confidence).abs().max() < 1e-5


@pytest.mark.parametrize("head", HEADS[1:])
def test_known_tokens_give_the_same_biases_at_once(head, plain):
    d, _ = drafter_of(plain, head)
    hidden, tokens = torch.randn(2, 4, 32), torch.randint(0, 63, (2, 4))
    embedded, state = d.markov_head.embed(tokens), None
    for k, bias in enumerate(d.markov_head.block(embedded, hidden).unbind(1)):
        one, state = d.markov_head.step(embedded[:, k], hidden[:, k], state)
        assert (one - bias).abs().max() < 1e-6


@pytest.mark.parametrize("head", HEADS)
def test_what_is_saved_is_what_is_loaded(head, plain, tmp_path):
    d, model = drafter_of(plain, head, sample_from_anchor=head != "none")
    target, _ = build(load_pair_of(tmp_path, plain, model, d))
    cfg = load_pair(tmp_path / "target", tmp_path / "drafter")
    assert (cfg.model.draft, cfg.model.drafter, cfg.model.target) == (model.draft, model.drafter, model.target)
    _, loaded = build(cfg)
    for name, tensor in d.named_parameters():
        assert torch.equal(tensor, dict(loaded.named_parameters())[name]), name
    assert target.cfg == model.target


def load_pair_of(folder, plain, model, drafter):
    from dspark_lab.models.decoder import Target

    target = Target(model.target)
    init_random(target, 2)
    save_target(target, model.target, folder / "target", context_len=model.context_len, dtype=torch.float32)
    save_drafter(drafter, model, folder / "drafter", dtype=torch.float32)
    return load_pair(folder / "target", folder / "drafter")


def test_a_wider_block_drops_the_anchors_row(plain):
    """With the anchor's row predicting nothing, γ + 1 rows go in and the last γ come out."""
    d, _ = drafter_of(plain, "none", sample_from_anchor=False)
    ids = torch.tensor([[3, 63, 63, 63, 63]])
    batch = plain.batch_of(ids, torch.tensor([0]), torch.tensor([0]), block=True)
    everything, _ = d.run(batch, d.new_cache(1, 8))
    assert torch.equal(d(batch, d.new_cache(1, 8))[0], everything[1:])
