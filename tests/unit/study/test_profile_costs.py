"""Step costs measured live on tiny: every point drafts whole blocks and verifies just what was asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import dspark_lab as lab
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.request import workload
from dspark_lab.models.weights import build
from dspark_lab.plan.sps import SpsProfile
from dspark_lab.study import profile_costs as study

TINY = lab.preset("tiny", device="cpu", block_size=3, prompt_len=4, max_new_tokens=8, context_len=64)


@pytest.fixture(scope="module")
def models():
    return build(TINY, "cpu")


@pytest.fixture(scope="module")
def profile(models) -> SpsProfile:
    return lab.profile_costs(TINY, requests=[1, 2], num_steps=2, warmup_steps=1, models=models)


def test_every_width_is_a_point_with_its_source(profile: SpsProfile, tmp_path) -> None:
    assert profile.points == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 4), (2, 6), (2, 8)]
    assert all(0 < s < 5 for s in profile.seconds)
    assert profile.environment["device"] == "cpu"
    protocol = profile.environment["protocol"]
    assert (protocol["prompt_len"], protocol["num_steps"], protocol["burst"]) == (4, 2, 1)
    assert 0 <= protocol["spread_pct"] < 200
    profile.check_matches(TINY, profile.environment["device_name"])
    assert lab.load_sps(profile.save(tmp_path / "sps.json")) == profile
    assert profile.additive().seconds_at(2, [6])[0] == pytest.approx(profile.seconds[6], rel=0.9)


def test_tokens_choose_the_widths(models) -> None:
    seen = []
    few = lab.profile_costs(
        TINY,
        requests=[1, 2],
        tokens=[2, 4],
        num_steps=1,
        warmup_steps=0,
        models=models,
        on_progress=lambda *x: seen.append(x),
    )
    assert few.points == [(1, 2), (1, 4), (2, 2), (2, 4)]
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize("width", [1, 2, 4])
@torch.inference_mode()
def test_a_cut_round_drafts_the_block_and_commits_what_a_cut_block_would(models, width: int) -> None:
    engine = DecodeEngine(TINY.replace(batch_size=2), *models, torch.device("cpu"))
    waiting = workload(TINY)
    engine.admit(lambda _: next(waiting))
    engine.drain()
    before = engine.rounds.state.table.clone()
    load = {"max_keys": 12, "num_requests": 2, "num_token_non_padded": None}
    engine.rounds.draft(2, **load)
    drafts = engine.rounds.drafts[:2].clone()
    engine.rounds.verify(2, **load)
    whole = engine.rounds.packed[:2].clone()
    engine.rounds.state.table.copy_(before)
    cut = study.CutRounds(engine.rounds, width)
    cut.draft(2, **load)
    assert torch.equal(cut.drafts[:2], drafts[:, : width - 1])
    cut.verify(2, **load)
    assert cut.executed_tokens == 2 * width
    for ours, theirs in zip(cut.packed[:2].tolist(), whole.tolist(), strict=True):
        num = min(theirs[4], width)
        assert ours[width:] == [num, width - 1]
        assert ours[:num] == theirs[:num]  # greedy: a shorter block commits a prefix of what the whole one does


def test_it_refuses_to_time_another_load(models, monkeypatch) -> None:
    count = study.CutRounds.build_verify_batch

    def one_more(self, b, **load):
        batch = count(self, b, **load)
        self.executed_tokens += 1
        return batch

    monkeypatch.setattr(study.CutRounds, "build_verify_batch", one_more)
    with pytest.raises(lab.LabError, match="verified 7 tokens where 6 were asked for"):
        lab.profile_costs(TINY, requests=[2], tokens=[6], num_steps=1, models=models)


def test_a_scheduler_reads_it(profile: SpsProfile) -> None:
    made = replace(profile, seconds=tuple(1e-3 * (1 + b) for b in profile.tokens))  # every token is dear
    scheduler = lab.Scheduler(made.additive(), block_size=3, max_requests=2)
    scheduler.publish(0, ["a", "b"], np.array([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]]))
    assert scheduler.trims
    assert scheduler.budget(2, ["a", "b"]) == 2
    assert scheduler.budget(2, ["c", "b"]) == 3


@pytest.mark.parametrize(
    ("toggles", "options", "text"),
    [
        ({}, {"requests": [2], "tokens": [2, 3]}, "tokens=3 is in no point: tokens are requests times 1 to 4"),
        ({}, {"requests": [2, 3], "tokens": [2, 4]}, "requests=3 is in no point"),
        ({}, {"requests": [0]}, "requests holds 0"),
        ({}, {"requests": []}, "requests is empty"),
        ({}, {"requests": [1], "num_steps": 0}, "num_steps=0"),
        ({"ep_size": 2}, {"requests": [1]}, "this config has 2"),
        ({"speculate": False}, {"requests": [1]}, "speculate=False"),
    ],
)
def test_what_it_refuses(toggles, options, text) -> None:
    with pytest.raises(lab.LabError, match=text):
        lab.profile_costs(TINY.replace(**toggles), **options)
