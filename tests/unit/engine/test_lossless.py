"""Speculative output equals plain greedy decoding, token for token, whatever is toggled (float32)."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_lab.config import LabConfig, preset
from dspark_lab.engine.generate import generate, generate_plain
from dspark_lab.errors import LabError

DENSE = {"target_num_experts": 0, "draft_num_experts": 0}
NEW = 24


def prompts(cfg: LabConfig, n: int) -> list[list[int]]:
    """Ragged prompts of 1 to 13 ids."""
    rng = np.random.default_rng(n)
    return [rng.integers(0, cfg.model.target.vocab_size - 1, rng.integers(1, 14)).tolist() for _ in range(n)]


def check(cfg: LabConfig, models) -> list:
    pair = models(cfg)
    some = prompts(cfg, cfg.engine.batch_size)
    out = generate(cfg, some, max_new_tokens=NEW, models=pair)
    for o, prompt in zip(out, some, strict=True):
        assert o.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=NEW)
    return out


@pytest.mark.parametrize("weights", ["bigram", "random"])
@pytest.mark.parametrize("shape", [{}, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("block_size", range(1, 9))
def test_any_block_size(block_size: int, shape: dict, weights: str, models) -> None:
    check(preset("tiny", device="cpu", block_size=block_size, batch_size=3, weights=weights, **shape), models)


@pytest.mark.parametrize("shape", [{}, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("batch_size", range(1, 9))
def test_any_batch_size(batch_size: int, shape: dict, models) -> None:
    out = check(preset("tiny", device="cpu", batch_size=batch_size, **shape), models)
    assert sum(map(len, (o.acceptance_lengths for o in out))) > 0


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.9, 1.0])
def test_any_threshold(threshold: float, models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=4, verify="threshold", confidence_threshold=threshold)
    out = check(cfg, models)
    proposals = [p for o in out for p in o.proposal_lengths]
    lengths = [a for o in out for a in o.acceptance_lengths]
    assert all(a <= p + 1 for a, p in zip(lengths, proposals, strict=True))
    assert min(proposals) < cfg.model.drafter.block_size  # the threshold cut something


@pytest.mark.parametrize("overlap", [False, True])
def test_without_speculation_a_step_is_one_token(overlap: bool, models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=3, speculate=False, overlap=overlap, alloc="blocking")
    for o in check(cfg, models):
        assert set(o.acceptance_lengths) == {1}
        assert set(o.proposal_lengths) == {0}


KINDS = {
    "dflash": {"drafter_kind": "dflash", "sample_from_anchor": False, "markov_rank": 0, "markov_head": "none"},
    "eagle3": {"drafter_kind": "eagle3", "draft_num_hidden_layers": 1, "weights": "random"},
    "lookup": {"drafter_kind": "lookup"},
    "gated": {"markov_head": "gated", "weights": "random"},
    "rnn": {"markov_head": "rnn", "weights": "random"},
    "rank 0": {"markov_rank": 0, "markov_head": "none"},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_is_lossless(kind: str, overlap: bool, models) -> None:
    out = check(preset("tiny", device="cpu", batch_size=3, overlap=overlap, **KINDS[kind]), models)
    assert all(sum(o.acceptance_lengths) >= NEW - 1 for o in out)


def test_lookup_finds_what_repeats(models) -> None:
    """A target that writes one cycle of 15 tokens: from the second turn on every block is accepted whole."""
    cfg = preset(
        "tiny",
        device="cpu",
        batch_size=1,
        target_vocab_size=16,
        draft_vocab_size=16,
        mask_token_id=15,
        drafter_kind="lookup",
    )
    pair = models(cfg)
    out = generate(cfg, [[1]], max_new_tokens=64, models=pair)[0]
    assert out.tokens == generate_plain(cfg, [1], target=pair[0], max_new_tokens=64)
    assert out.acceptance_lengths[-2] == cfg.model.drafter.block_size + 1
    assert out.proposal_lengths[0] == 0


def test_more_prompts_than_slots_and_lengths_are_not_cut(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2)
    pair, some = models(cfg), prompts(cfg, 5)
    for o, prompt in zip(generate(cfg, some, max_new_tokens=NEW, models=pair), some, strict=True):
        assert o.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=NEW)
        assert len(o.tokens) == len(prompt) + NEW
        total = sum(o.acceptance_lengths)
        assert total >= NEW  # rounds run while the sum is below
        assert total - o.acceptance_lengths[-1] < NEW


def test_accept_length_of_the_synthetic_pair_is_of_use(models) -> None:
    for gamma in range(2, 9):
        cfg = preset("tiny", device="cpu", block_size=gamma, batch_size=8)
        out = generate(cfg, prompts(cfg, 8), max_new_tokens=64, models=models(cfg))
        lengths = [a for o in out for a in o.acceptance_lengths]
        assert 1.5 <= np.mean(lengths) <= gamma + 0.5, (gamma, np.mean(lengths))


def test_every_strategy_gives_the_same_tokens(models) -> None:
    outs = []
    for alloc in ("none", "blocking", "non_blocking", "on_demand", "pinned:always", "persistent:always"):
        cfg = preset("tiny", device="cpu", batch_size=3, alloc=alloc)
        outs.append(generate(cfg, prompts(cfg, 3), max_new_tokens=NEW, models=models(cfg)))
    assert all(o == outs[0] for o in outs)


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "8"])
def test_max_new_tokens_is_at_least_one(limit) -> None:
    with pytest.raises(LabError, match=r"max_new_tokens=.* whole number of at least 1"):
        generate(preset("tiny", device="cpu"), [[1, 2]], max_new_tokens=limit)


@pytest.mark.parametrize("new", [1, 2])
def test_few_new_tokens_are_that_few(new: int, models) -> None:
    cfg = preset("tiny", device="cpu")
    out = generate(cfg, [[1, 2], (3,)], max_new_tokens=new, models=models(cfg))  # type: ignore[list-item]
    assert [len(o.tokens) for o in out] == [2 + new, 1 + new]


@pytest.mark.parametrize(
    ("some", "said"),
    [
        ([1, 2], r"prompts=\[1, 2\] holds 1, .* \[\[1, 2\]\]"),
        ("text", r"prompts='text'"),
        (["text"], r"holds 'text'"),
        (None, "prompts=None"),
        (5, "prompts=5"),
        ([[1], None], "holds None"),
        (np.zeros((2, 2), dtype=int), "prompts=array"),
        ([[1, True]], "prompt id True"),
        ([[1, 2.0]], r"prompt id 2\.0"),
        ([["1"]], "prompt id '1'"),
        ([[[1]]], r"prompt id \[1\]"),
        ([[-1]], "prompt id -1 .* 0 to 255"),
        ([[]], "empty prompt"),
    ],
)
def test_prompts_are_lists_of_lists_of_ids(some, said: str) -> None:
    with pytest.raises(LabError, match=said) as e:
        generate(preset("tiny", device="cpu"), some, max_new_tokens=4)
    assert "\n" not in str(e.value)


def test_ids_of_an_array_are_ids(models) -> None:
    cfg = preset("tiny", device="cpu")
    out = generate(cfg, [list(np.array([1, 2]))], max_new_tokens=4, models=models(cfg))
    assert out == generate(cfg, [[1, 2]], max_new_tokens=4, models=models(cfg))
    assert {type(t) for t in out[0].tokens} == {int}
