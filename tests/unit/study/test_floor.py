"""The byte floor: by hand for one shape, and of the recordings."""

from __future__ import annotations

from dataclasses import replace

import pytest

import dspark_lab as lab
from dspark_lab.config import preset
from dspark_lab.plan.floor import step_bytes


def test_bytes_by_hand() -> None:
    cfg = preset("tiny", batch_size=2)  # float32: 4 bytes; 2 target and 1 draft layer of hidden 64
    b = step_bytes(cfg, target_hits=[3.0, 5.0], draft_hits=[2.0], context=100)
    assert b.attention == 4 * 3 * 64 * 16 * (2 * 4 + 2 * 2)
    assert b.experts == 4 * 3 * 64 * 64 * (3 + 5 + 2)
    assert b.heads == 4 * (2 * 256 * 64 + 2 * 64 * 64 + 3 * 8 * 64)
    assert b.markov == 4 * 5 * 256 * 48
    assert b.kv == 4 * 2 * 3 * 2 * 16 * 100 * 2
    assert b.total == b.attention + b.experts + b.heads + b.markov + b.kv
    assert b.floor_us(1e12) == pytest.approx(b.total / 1e6)


def test_bytes_of_other_drafters_by_hand() -> None:
    """Lookup reads nothing of its own; one token after another reads its weights γ = 5 times and has no Markov head."""
    hits = {"target_hits": [3.0, 5.0], "draft_hits": [2.0], "context": 100}
    cfg = preset("tiny", batch_size=2, weights="random")
    lookup = step_bytes(cfg.replace(drafter_kind="lookup"), target_hits=[3.0, 5.0], draft_hits=[], context=100)
    assert lookup == step_bytes(cfg.replace(speculate=False), **hits)
    eagle = step_bytes(cfg.replace(drafter_kind="eagle3"), **hits)
    qkv, o = 64 * 16 * (4 + 2 * 2), 64 * 16 * 4
    assert eagle.attention == 4 * ((2 + 5) * (qkv + o) + 5 * qkv)
    assert eagle.experts == 4 * 3 * 64 * 64 * (3 + 5 + 5 * 2)
    assert eagle.heads == 4 * ((1 + 5) * 256 * 64 + (2 + 5) * 8 * 64 + 2 * 64 * 64)
    assert eagle.markov == 0
    assert eagle.kv == 4 * 2 * (2 + 5) * 2 * 16 * 100 * 2


def test_tp_halves_what_it_cuts() -> None:
    one, two = (
        step_bytes(preset("small", tp_size=t), target_hits=[20.0] * 12, draft_hits=[20.0] * 3, context=0)
        for t in (1, 2)
    )
    assert two.attention == one.attention // 2
    assert two.experts == one.experts // 2
    assert two.markov == one.markov // 2


def test_recordings_stand_above_their_floor() -> None:
    runs = [r for r in lab.recorded_runs(preset="small", tp_size=1, alloc="none", host_work_us=0.0) if r.acceptance]
    table = lab.byte_floor(runs)
    assert (table["ratio"] > 1.0).all()
    graph = table[table["name"] == "small-ep1-bs8-none"].iloc[0]
    assert 1.2 < graph["ratio"] < 1.6
    with pytest.raises(lab.LabError, match="no expert counts"):
        lab.byte_floor([replace(runs[0], ep=())])
