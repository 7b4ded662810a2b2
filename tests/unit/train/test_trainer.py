"""A run learns, an interrupted one ends where the whole one does, and cached states are those computed on the fly."""

from __future__ import annotations

import pytest
import torch

from dspark_lab.errors import LabError
from dspark_lab.train.anchors import draw_anchors
from dspark_lab.train.data import TokenData, token_data
from dspark_lab.train.drafting import DrafterTask
from dspark_lab.train.optimizer import Schedule
from dspark_lab.train.shapes import new_drafter
from dspark_lab.train.states import Cached, OnTheFly
from dspark_lab.train.trainer import Recipe, Trainer

RECIPE = Recipe(num_steps=12, batch_size=2, num_anchors=4, peak_lr=3e-3, seed=7)


@pytest.fixture
def data() -> TokenData:
    period = torch.arange(24) % 6
    tokens = torch.stack([period + shift for shift in range(6)])
    return TokenData(tokens=tokens, loss_mask=torch.ones_like(tokens, dtype=torch.bool))


def trainer_of(target, cfg, data, recipe=RECIPE, *, cached=False) -> Trainer:
    drafter = new_drafter(cfg, target, 1, device="cpu", dtype=torch.float32)
    layers = cfg.drafter.target_layer_ids
    states = Cached(target, layers, data, device=torch.device("cpu")) if cached else OnTheFly(target, layers)
    return Trainer(DrafterTask(target, drafter, data, recipe, states), recipe)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.task.model.named_parameters()}


@pytest.mark.parametrize("kind", [{"markov_head": "rnn", "backbone": "moe"}, {"drafter": "eagle3"}], ids=str)
def test_training_learns_and_leaves_what_is_frozen(kind, target, model, data):
    recipe = Recipe(num_steps=60, batch_size=3, num_anchors=8, peak_lr=1e-2)
    trainer = trainer_of(target, model(**kind), data, recipe)
    before, seen = weights_of(trainer), []
    trainer.run(log_every=1, progress=seen.append)
    first, last = (sum(p.scalars["accept_length"] for p in part) for part in (seen[:5], seen[-5:]))
    assert last > first + 0.5
    assert [p.step for p in seen] == list(range(1, 61))
    after = weights_of(trainer)
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert same == {"embed_tokens.weight", "lm_head.weight"}


def test_an_interrupted_run_ends_where_the_whole_one_does(target, model, data, tmp_path):
    whole = trainer_of(target, model(), data)
    whole.run(log_every=4)
    cut = trainer_of(target, model(), data)
    cut.run(until=7, log_every=4, state_path=tmp_path / "state.pt", save_every=5)
    resumed = trainer_of(target, model(), data)
    resumed.load(tmp_path / "state.pt")
    assert resumed.step == 7
    resumed.run(log_every=4)
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(resumed)[name]), name
    assert [p.step for p in resumed.history] == [4, 7, 8, 12]
    other = trainer_of(target, model(), data, Recipe(num_steps=13))
    with pytest.raises(LabError, match="num_steps=12 there and 13 here"):
        other.load(tmp_path / "state.pt")


def test_cached_states_are_those_on_the_fly(target, model, data):
    fresh, cached = trainer_of(target, model(), data), trainer_of(target, model(), data, cached=True)
    for step in (0, 2):
        ours, theirs = (t.task.losses(t.task.inputs_of(step)) for t in (fresh, cached))
        assert {name: float(v.detach()) for name, v in ours.items()} == pytest.approx(
            {name: float(v.detach()) for name, v in theirs.items()}, rel=1e-5
        )


def test_anchors_follow_the_mask():
    mask = torch.tensor([[False, True, True, True, False, True, True], [True] + [False] * 6])
    drawn = draw_anchors(mask, 4, 3, torch.rand(2, 6))
    assert drawn.positions[0].tolist() == [0, 1, 2, 5] or drawn.positions[0].tolist() == [1, 2, 5, 0]
    by_anchor = dict(zip(drawn.positions[0].tolist(), drawn.mask[0].tolist(), strict=True))
    assert by_anchor[1] == [True, True, False]  # the gap at 4 ends the block
    assert by_anchor[5] == [True, False, False]  # and so does the end
    assert drawn.kept.sum(dim=1).tolist() == [3, 0]
    assert not drawn.mask[1].any()


def test_fewer_anchors_are_drawn_evenly():
    mask, counts = torch.ones(1, 11, dtype=torch.bool), torch.zeros(11)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        positions = draw_anchors(mask, 3, 2, torch.rand(1, 10, generator=generator)).positions[0]
        assert len(set(positions.tolist())) == 3
        counts[positions] += 1
    assert counts[10] == 0  # nothing follows the last token
    assert counts[:10].min() > 80  # 120 each on average
    assert counts[:10].max() < 160


def test_every_epoch_takes_every_sequence_once(data):
    epoch = torch.cat([data.rows(step, 2, 5) for step in range(3)])
    assert sorted(epoch.tolist()) == list(range(6))
    assert (
        data.rows(3, 2, 5).tolist() != data.rows(0, 2, 5).tolist()
        or data.rows(4, 2, 5).tolist() != data.rows(1, 2, 5).tolist()
    )


def test_short_sequences_are_dropped_and_prompts_are_not_predicted():
    data = token_data([list(range(40)), [1, 2, 3], list(range(30))], 32, prompt_lens=[4, 0, 17])
    assert len(data) == 1
    assert data.loss_mask[0].tolist() == [False] * 4 + [True] * 28
    with pytest.raises(LabError, match="none of 1 sequences has 14 tokens"):
        token_data([[1, 2, 3]], 32)


def test_the_rate_rises_and_falls():
    schedule = Schedule(peak_lr=1.0, num_steps=100, warmup=0.04)
    assert [schedule.lr(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.lr(52) == pytest.approx(0.5)
    assert schedule.lr(99) < 1e-3
