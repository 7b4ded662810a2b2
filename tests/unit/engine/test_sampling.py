"""Sampling in the decode loop: what is generated has the target's distribution, whoever drafts and however blocks are cut."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import dspark_lab as lab
from dspark_kernels.sampling.reference import probabilities
from dspark_lab.config import LabConfig, preset
from dspark_lab.engine.generate import generate, generate_plain
from dspark_lab.engine.request import workload
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.plan.costs import CostWarning
from dspark_lab.spec.sampling import Sampling, sampling_rows

V = 5
SMALL = {"device": "cpu", "target_vocab_size": V, "draft_vocab_size": V, "mask_token_id": V - 1, "weights": "random"}
PROMPT = [1, 2, 3]
NUM = 500
SETTING = Sampling(temperature=0.7, top_k=4, top_p=0.95)


def next_probs(target: Target, rows: list[list[int]], setting: Sampling) -> np.ndarray:
    """[N, V] what the target samples from behind each of ``rows``, all of one length."""
    n, s = len(rows), len(rows[0])
    cache = target.new_cache(n, s)
    positions = torch.arange(s).repeat(n)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=n, num_tokens_per_req=s, input_ids=torch.tensor(rows).flatten(),
        positions=positions, req_slots=torch.arange(n), key_limits=positions + 1, max_keys=s,
        num_token_non_padded=None, num_token_non_padded_cpu=n * s,
    )  # fmt: skip
    with torch.inference_mode():
        hidden = target.forward(batch, cache).hidden.view(n, s, -1)[:, -1]
        return probabilities(target.logits(hidden), sampling_rows([setting] * n)).double().numpy()


def exact(target: Target, setting: Sampling) -> np.ndarray:
    """[V, V, V] probability of the first three tokens behind `PROMPT`."""
    first = next_probs(target, [PROMPT], setting)[0]
    second = next_probs(target, [[*PROMPT, a] for a in range(V)], setting)
    third = next_probs(target, [[*PROMPT, a, b] for a in range(V) for b in range(V)], setting).reshape(V, V, V)
    return first[:, None, None] * second[:, :, None] * third


WAYS = {
    "vanilla": {},
    "vanilla, run ahead": {"overlap": True},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "rank 0": {"markov_rank": 0, "markov_head": "none"},
    "dflash": {"drafter_kind": "dflash", "sample_from_anchor": False, "markov_rank": 0, "markov_head": "none"},
    "eagle3": {"drafter_kind": "eagle3", "draft_num_hidden_layers": 1},
    "lookup": {"drafter_kind": "lookup"},
    "threshold": {"verify": "threshold", "confidence_threshold": 0.5},
    "scheduled": {"verify": "scheduled"},
    "scheduled, compact, run ahead": {"verify": "scheduled", "layout": "compact", "overlap": True},
    "without speculation": {"speculate": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_output_has_the_targets_distribution(way: str, models, tmp_path) -> None:
    cfg = preset("tiny", batch_size=100, buckets=(100,), max_new_tokens=3, **SMALL, **WAYS[way], block_size=3)
    cfg = cfg.replace(temperature=SETTING.temperature, top_k=SETTING.top_k, top_p=SETTING.top_p, seed=11)
    pair = models(cfg)
    if cfg.engine.verify == "scheduled":
        cfg = cfg.replace(sps_path=str(costs(cfg, tmp_path, width=100)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CostWarning)
        out = generate(cfg, [PROMPT] * NUM, models=pair)
    counts = np.zeros((V, V, V))
    for o in out:
        counts[tuple(o.tokens[3:6])] += 1
    expected = exact(pair[0], SETTING).reshape(-1) * NUM
    counts = counts.reshape(-1)
    assert counts[expected == 0].sum() == 0  # what top-k and top-p cut away never comes
    often = expected >= 5
    pooled = np.array([*counts[often], counts[~often].sum()]), np.array([*expected[often], expected[~often].sum()])
    chi2 = ((pooled[0] - pooled[1]) ** 2 / pooled[1].clip(1e-9)).sum()
    assert chi2 < quantile_999(int(often.sum()))
    if way in ("scheduled", "threshold"):
        verified = {p for o in out for p in o.proposal_lengths}
        assert len(verified) > 1  # blocks were really cut, at different lengths


def quantile_999(degrees: int) -> float:
    """Of χ², by Wilson and Hilferty: a sound sampler is above it once in a thousand seeds."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def costs(cfg: LabConfig, folder, width: int):
    """A table in which every verified draft costs, saved for ``sps_path``; times are made, their use is real."""
    gamma = cfg.model.drafter.block_size
    tokens = [width * w for w in range(1, gamma + 2)]
    profile = lab.SpsProfile(
        requests=(width,) * len(tokens), tokens=tuple(tokens), seconds=tuple(0.3 + t / width for t in tokens),
        block_size=gamma, environment={"device_name": device_name()}, source="simulated",
    )  # fmt: skip
    return profile.save(folder / "sps.json")


def device_name() -> str:
    from dspark_lab.device import device_name

    return device_name(torch.device("cpu"))


def test_rows_of_a_mixed_batch_are_what_they_are_alone(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=4, max_new_tokens=20)
    settings = [
        Sampling(temperature=0),
        Sampling(temperature=4.0),
        Sampling(temperature=4.0, top_k=50),
        Sampling(temperature=0),
    ]
    prompts = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14]]
    mixed = generate(cfg, prompts, sampling=settings, models=models(cfg))
    for i in (0, 3):  # greedy ones equal the target's own argmax
        assert mixed[i].tokens == generate_plain(cfg, prompts[i], target=models(cfg)[0], max_new_tokens=20)
    all_sampled = generate(
        cfg,
        prompts,
        sampling=[Sampling(temperature=4.0), *settings[1:3], Sampling(temperature=4.0)],
        models=models(cfg),
    )
    assert [o.tokens for o in mixed[1:3]] == [o.tokens for o in all_sampled[1:3]]
    assert mixed[1].tokens != generate(cfg.replace(seed=1), prompts, sampling=settings, models=models(cfg))[1].tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_seed_gives_the_same_tokens_whatever_runs_beside(overlap: bool, models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2, temperature=4.0, overlap=overlap)
    prompts = [[3, 4], [5], [6, 7, 8], [9, 10]]
    two = generate(cfg, prompts, max_new_tokens=16, models=models(cfg))
    four = generate(cfg.replace(batch_size=4), prompts, max_new_tokens=16, models=models(cfg))
    assert [o.tokens for o in two] == [o.tokens for o in four]


def test_settings_are_checked(models) -> None:
    cfg = preset("tiny", device="cpu")
    with pytest.raises(LabError, match="sampling has 1 settings and there are 2 prompts"):
        generate(cfg, [[1], [2]], sampling=[Sampling()])
    with pytest.raises(LabError, match=r"sampling holds 0\.7"):
        generate(cfg, [[1]], sampling=[0.7])  # type: ignore[list-item]
    for toggles, said in (
        ({"temperature": -1.0}, "temperature=-1.0 is neither 0"),
        ({"temperature": 1e-9}, "temperature=1e-09 is neither 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 is not above 0"),
        ({"top_k": 5}, "not read at temperature=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"stop_token_ids": (256,)}, "beyond the vocabulary"),
        ({"temperature": 1.0, "simulated_accept_length": 3.0}, "draws what is accepted"),
        ({"verify": "static", "sps_path": "x.json"}, "sps_path='x.json' is not read"),
        (
            {"layout": "compact", "attn_dp": 2, "ep_size": 2, "alloc": "on_demand", "dispatcher": "all_gather"},
            "attn_dp=2 deals",
        ),
    ):
        with pytest.raises(LabError, match=said):
            cfg.replace(**toggles)


# -- stop tokens and the end of the context ------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_a_stop_token_ends_a_request_wherever_it_stands_in_a_block(overlap: bool, temperature: float, models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=3, overlap=overlap, temperature=temperature)
    prompts = [[i, i + 1] for i in range(1, 13)]
    whole = generate(cfg, prompts, max_new_tokens=24, models=models(cfg))
    stops = (whole[0].tokens[6], whole[3].tokens[3], whole[5].tokens[2])  # in a block, and one right after a prompt
    out = generate(cfg.replace(stop_token_ids=stops), prompts, max_new_tokens=24, models=models(cfg))
    for o, w, prompt in zip(out, whole, prompts, strict=True):
        new = w.tokens[len(prompt) :]
        first = next((i for i, t in enumerate(new) if t in stops), None)
        cut = new if first is None else new[: first + 1]
        assert o.tokens[len(prompt) :] == cut
        assert o.ended == ("length" if first is None else "stop")
    assert out[5].acceptance_lengths == []  # the prefill's own token stopped it
    assert {o.ended for o in out} == {"length", "stop"} or all(o.ended == "stop" for o in out)


@pytest.mark.parametrize("verify", ["static", "threshold"])
def test_the_context_may_be_filled_to_its_last_position(verify: str, models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2, context_len=40, prompt_len=4, max_new_tokens=8, verify=verify)
    prompts = [[1, 2, 3, 4], [7] * 10]
    out = generate(cfg, prompts, max_new_tokens=30, models=models(cfg))
    for o, prompt in zip(out, prompts, strict=True):
        assert o.tokens == generate_plain(cfg, prompt, target=models(cfg)[0], max_new_tokens=30)
    last = out[1]
    assert len(last.tokens) == 40
    assert sum(last.acceptance_lengths) <= 30  # the window was cut: nothing was committed behind the context
    with pytest.raises(LabError, match="needs 41 positions"):
        generate(cfg, [[7] * 11], max_new_tokens=30, models=models(cfg))


def test_kept_rounds_tell_what_was_drafted(models) -> None:
    cfg = preset("tiny", device="cpu", batch_size=2, verify="threshold", confidence_threshold=0.5)
    plain = generate(cfg, [[1, 2], [3]], max_new_tokens=20, models=models(cfg))
    out = generate(cfg, [[1, 2], [3]], max_new_tokens=20, keep_rounds=True, models=models(cfg))
    for o, p in zip(out, plain, strict=True):
        assert (o.tokens, o.acceptance_lengths) == (p.tokens, p.acceptance_lengths)
        assert [r.accepted + 1 for r in o.rounds] == o.acceptance_lengths
        assert [r.verified for r in o.rounds] == o.proposal_lengths
        for r in o.rounds:
            assert r.confidence is not None
            cut = next((i for i, c in enumerate(r.confidence) if c < 0.5), len(r.confidence))
            assert r.verified == cut
            assert r.drafts[: r.accepted] == r.tokens[:-1]
            assert len(r.drafts) == cfg.model.drafter.block_size


def test_prompts_of_a_measured_run_are_held_out_text(models) -> None:
    cfg = lab.shipped(device="cpu")
    assert cfg.engine.text == "mixed"
    requests = workload(cfg)
    kinds = [bytes(next(requests).prompt) for _ in range(6)]
    assert all(len(k) == 128 for k in kinds)
    assert [k.endswith(b"Answer:") for k in kinds] == [True, False, False] * 2
    code = [bytes(r.prompt) for _, r in zip(range(20), workload(cfg.replace(text="code", prompt_len=40)), strict=False)]
    assert len(set(code)) > 10
    with pytest.raises(LabError, match="prompt_len=129 is over 128"):
        cfg.replace(prompt_len=129)
    with pytest.raises(LabError, match="'novel'"):
        cfg.replace(text="novel")
    with pytest.raises(LabError, match="vocab_size is 128"):
        preset("tiny", target_vocab_size=128, draft_vocab_size=128, mask_token_id=127, text="code")
