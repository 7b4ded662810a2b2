"""Random and synthetic weights: equal at any EP size, finite, and a pair that agrees most of the time but not always."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dspark_lab.config.lab import LabConfig
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.config.presets import preset
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.errors import LabError
from dspark_lab.models.moe import Experts
from dspark_lab.models.weights import build, build_pair, init_bigram


@dataclass
class Decoded:
    """What some greedy rounds of a batch gave."""

    accept_length: float
    proposal_length: float
    survived: torch.Tensor
    """Confidence of accepted tokens, and of the first rejected ones."""
    rejected: torch.Tensor
    finite: bool


def decode(cfg: LabConfig, plain, num_rounds: int = 40) -> Decoded:
    """Plain greedy rounds; ``proposal_length`` is where a threshold of 0.5 would cut."""
    target, drafter = build(cfg)
    b, n, gamma, slots = 8, 6, drafter.block_size, torch.arange(8)
    layers = cfg.model.drafter.target_layer_ids
    target_cache, cache = target.new_cache(b, cfg.model.context_len), drafter.new_cache(b, cfg.model.context_len)
    ids = torch.randint(0, cfg.model.drafter.mask_token_id, (b, n))
    tokens, seq_lens, finite = ids, torch.zeros(b, dtype=torch.int64), True
    accepts, cuts, good, bad = [], [], [], []
    for round_ in range(num_rounds + 1):
        batch = plain.batch_of(tokens, seq_lens, slots)
        out = target(batch, target_cache, capture_layers=layers)
        logits = target.logits(out.hidden).view(b, tokens.shape[1], -1)
        drafter.write_context(out.aux, batch.token_slots, batch.positions, cache)
        best = logits.argmax(-1)
        finite &= bool(logits.isfinite().all())
        if round_ == 0:
            anchors, seq_lens = best[:, -1], seq_lens + n
        else:
            match = tokens[:, 1:] == best[:, :-1]
            accepted = match.int().cumprod(1).sum(1)
            accepts.append(accepted + 1)
            for r in range(b):
                a = int(accepted[r])
                good.append(proposal.confidence[r, :a])  # noqa: F821
                bad.append(proposal.confidence[r, a : a + 1])  # noqa: F821
            anchors, seq_lens = best[torch.arange(b), accepted], seq_lens + accepted + 1
        block = torch.full((b, gamma), drafter.mask_token_id)
        block[:, 0] = anchors
        proposal = drafter.propose(drafter(plain.batch_of(block, seq_lens, slots, block=True), cache), anchors)
        finite &= bool(proposal.corrected_logits.isfinite().all())
        cuts.append((proposal.confidence >= 0.5).int().cumprod(1).sum(1))
        tokens = torch.cat((anchors[:, None], proposal.draft_tokens), dim=1)
    mean = lambda parts: torch.cat(parts).float().mean().item()  # noqa: E731
    return Decoded(mean(accepts), mean(cuts), torch.cat(good), torch.cat(bad), finite)


@pytest.mark.parametrize("block_size", [2, 3, 4, 5, 6, 7, 8])
def test_bigram_pair_agrees_but_not_always(block_size, plain):
    got = decode(preset("tiny", block_size=block_size), plain)
    assert 1.5 < got.accept_length < block_size + 0.5
    assert got.accept_length == pytest.approx(1 + sum(0.8**k for k in range(1, block_size + 1)), abs=0.45)
    assert 0.5 < got.proposal_length < block_size - 0.1
    assert got.survived.mean() > 0.75
    assert got.rejected.mean() < 0.35


@pytest.mark.parametrize(
    "toggles",
    [
        {"dtype": "bfloat16"},
        {"seed": 5},
        {"markov_rank": 0, "markov_head": "none", "confidence_head_with_markov": False},
        {"target_num_hidden_layers": 6, "draft_num_hidden_layers": 3},
        {"target_num_experts": 0, "draft_num_experts": 0},
    ],
)
def test_bigram_pair_of_other_shapes(toggles, plain):
    got = decode(preset("tiny", **toggles), plain)
    assert got.finite
    assert 1.5 < got.accept_length < 5.5


def test_layers_of_the_target_matter():
    """Without its experts or its attention the target gives other logits by far: they are more than decoration."""
    cfg = preset("tiny")
    ids = torch.randint(0, 255, (2, 12))

    def logits(silence: str) -> torch.Tensor:
        target, _ = build(cfg)
        for name, p in target.named_parameters():
            if silence and name.endswith(silence):
                p.zero_()
        from dspark_lab.models.batch import ForwardBatch, ForwardMode

        positions = torch.arange(12).expand(2, 12).reshape(-1)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=2,
            num_tokens_per_req=12,
            input_ids=ids.reshape(-1),
            positions=positions,
            req_slots=torch.arange(2),
            key_limits=positions + 1,
            max_keys=12,
            num_token_non_padded_cpu=24,
        )
        return target.logits(target(batch, target.new_cache(2, 12)).hidden)

    whole = logits("")
    assert (whole - logits("experts.down_proj")).abs().max() > 0.5
    assert (whole - logits("o_proj.weight")).abs().max() > 0.5


@pytest.mark.parametrize("weights", ["bigram", "random"])
def test_equal_at_any_ep_size(weights):
    cfg = preset("tiny", weights=weights)
    whole = build(cfg)
    for ep_size in (2, 4):
        for rank in range(ep_size):
            parallel = ParallelConfig(ep_size=ep_size, placement="round_robin")
            part = build_pair(
                cfg.replace(ep_size=ep_size), ExpertGroup(parallel=parallel, ep_rank=rank, all_reduce=lambda t: None)
            )
            for a, b in zip(part, whole, strict=True):
                compare(a, b)


def compare(part, whole) -> None:
    owners = {name: m for name, m in part.named_modules() if isinstance(m, Experts)}
    theirs = dict(whole.named_parameters())
    for name, p in part.named_parameters():
        owner = owners.get(name.rpartition(".")[0])
        expected = theirs[name] if owner is None else theirs[name][list(owner.expert_ids)]
        assert torch.equal(p, expected), name


def test_random_weights_are_seeded_finite_and_have_norms():
    cfg = preset("tiny", weights="random", dtype="bfloat16", seed=1)
    (a, da), (b, _), (c, _) = build(cfg), build(cfg), build(cfg.replace(seed=2))
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, da.lm_head.weight)
    w = a.model.layers[0].mlp.experts.gate_up_proj
    assert not torch.equal(w[0], w[1])
    norms = [p for n, p in a.named_parameters() if "norm" in n]
    assert all(0.01 < (p.float() - 1).abs().mean() < 0.3 for p in norms)
    assert not any(p.requires_grad for p in (*a.parameters(), *da.parameters()))


def test_random_pair_stays_finite_in_bfloat16(plain):
    got = decode(preset("tiny", weights="random", dtype="bfloat16"), plain, num_rounds=6)
    assert got.finite
    assert 1.0 <= got.accept_length <= 6.0


def test_tied_target_cannot_be_a_bigram(plain):
    with pytest.raises(LabError, match="tie_word_embeddings"):
        build(preset("tiny", target_tie_word_embeddings=True))
    assert init_bigram.__doc__


def test_num_bytes_counts_this_rank():
    cfg = preset("tiny")
    target, _ = build(cfg)
    assert target.num_bytes == sum(p.numel() * 4 for p in target.parameters())
    layer = target.model.moe_layers[0]
    assert layer.num_bytes == 8 * 3 * 64 * 64 * 4


def test_frequencies_stay_float32():
    target, _ = build(preset("tiny"))
    before = target.model.rope.inv_freq.clone()
    target.to(torch.bfloat16)
    assert target.model.rope.inv_freq.dtype == torch.float32
    assert torch.equal(target.model.rope.inv_freq, before)
