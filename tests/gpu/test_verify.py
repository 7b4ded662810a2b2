"""Sampling, stop tokens, schedules and the compact layout in captured rounds: what eager rounds give, and the same on a CPU's float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dspark_lab as lab
from dspark_lab.config import LabConfig, preset
from dspark_lab.device import device_name
from dspark_lab.engine.decode import DecodeEngine
from dspark_lab.engine.generate import generate
from dspark_lab.engine.request import Request
from dspark_lab.models.weights import build

CUDA = torch.device("cuda", 0)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [8, 9, 7], [2, 2]]
WAYS = {
    "sampled": {"temperature": 4.0},
    "sampled, cut": {"temperature": 4.0, "top_k": 40, "top_p": 0.9},
    "gated, sampled": {"temperature": 4.0, "markov_head": "gated", "weights": "random"},
    "stop tokens": {"stop_token_ids": tuple(range(0, 256, 9))},
    "threshold, compact": {"verify": "threshold", "confidence_threshold": 0.6, "layout": "compact"},
    "scheduled": {"verify": "scheduled"},
    "scheduled, compact": {"verify": "scheduled", "layout": "compact"},
    "scheduled, compact, sampled": {"verify": "scheduled", "layout": "compact", "temperature": 4.0},
}


def with_costs(cfg: LabConfig, folder: Path) -> LabConfig:
    """A made table in which every verified draft costs."""
    if cfg.engine.verify != "scheduled":
        return cfg
    gamma = cfg.model.drafter.block_size
    points = [(r, r * w) for r in (1, cfg.engine.batch_size) for w in range(1, gamma + 2)]
    profile = lab.SpsProfile(
        requests=tuple(r for r, _ in points), tokens=tuple(b for _, b in points),
        seconds=tuple(1.0 + (b - r) / r for r, b in points), block_size=gamma,
        environment={"device_name": device_name(CUDA)}, source="simulated",
    )  # fmt: skip
    return cfg.replace(sps_path=str(profile.save(folder / "sps.json")))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_captured_rounds_equal_eager_ones(way: str, overlap: bool, tmp_path: Path) -> None:
    cfg = preset("tiny", device="cuda", batch_size=3, overlap=overlap, **({"verify": "static"} | WAYS[way]))
    cfg = with_costs(cfg, tmp_path)
    pair = build(cfg, CUDA)
    eager = generate(cfg, PROMPTS, max_new_tokens=40, models=pair)
    graph = generate(cfg.replace(use_graph=True), PROMPTS, max_new_tokens=40, models=pair)
    assert [g.tokens for g in graph] == [e.tokens for e in eager]
    assert [g.proposal_lengths for g in graph] == [e.proposal_lengths for e in eager]
    assert any(a > 1 for e in eager for a in e.acceptance_lengths)


@torch.inference_mode()
def test_each_replay_draws_new_numbers() -> None:
    """A graph that kept the noise of its capture would draw the same token again and again from a flat target."""
    cfg = preset("tiny", device="cuda", batch_size=1, temperature=50.0, use_graph=True)
    engine = DecodeEngine(cfg, *build(cfg, CUDA), CUDA)
    engine.join(Request(prompt=[1, 2], max_new_tokens=60))
    tokens: list[int] = []
    while engine.active:
        for done in engine.step():
            tokens += done.tokens[0]
    engine.close()
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_a_trained_pair_decodes_in_bfloat16(layout: str) -> None:
    cfg = lab.shipped(
        "dspark-rnn", device="cuda", dtype="bfloat16", batch_size=3, use_graph=True, overlap=True, layout=layout
    )
    prompts = [lab.held_out(kind)[0] for kind in ("arithmetic", "code", "prose")]
    out = generate(cfg, prompts, max_new_tokens=96)
    lengths = [sum(o.acceptance_lengths) / len(o.acceptance_lengths) for o in out]
    assert min(lengths) > 1.8
    assert lengths[0] > 5  # arithmetic
