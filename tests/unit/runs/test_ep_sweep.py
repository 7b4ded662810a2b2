"""A sweep over EP size, dispatcher and placement: what it expands to, measures, tells by rank, and draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dspark_lab as lab
from dspark_lab.analysis.ep import expert_load, imbalance_of, rows_by_rank, traffic_of
from dspark_lab.engine.runnable import check_runnable
from dspark_lab.errors import LabError
from dspark_lab.runs.plan import expand
from dspark_lab.runs.record import Run, read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forked_ranks) -> list[Run]:
    cfg = lab.preset("tiny", device="cpu", batch_size=3, weights="random")
    with forked_ranks():
        return lab.sweep(
            cfg, ep_size=[1, 2], dispatcher=["all_reduce", "all_to_all"], placement=["balanced"], num_steps=6, repeats=2,
            profile_steps=0, out=tmp_path_factory.mktemp("ep") / "out",
        )  # fmt: skip


def test_what_a_sweep_leaves_open_follows() -> None:
    cfg = lab.preset("tiny", device="cpu")
    axes = {
        "ep_size": [1, 2, 4],
        "dispatcher": ["all_reduce", "all_to_all", "symm_mem"],
        "placement": ["contiguous", "balanced"],
    }
    got = [c.parallel for c in expand(cfg, axes)]
    assert sum(p.ep_size == 1 for p in got) == 1  # nothing is dispatched or placed there
    assert len(got) == 1 + 2 * 3 * 2
    assert {(p.dispatcher, p.attn_dp) for p in got if p.ep_size == 4} == {
        ("all_reduce", 1), ("all_to_all", 4), ("symm_mem", 1),
    }  # fmt: skip
    asked = expand(cfg, {"ep_size": [4], "dispatcher": ["all_to_all"], "attn_dp": [2]})
    assert [c.parallel.attn_dp for c in asked] == [2]


def test_tokens_and_figures_by_rank(runs: list[Run]) -> None:
    assert [(r.config.parallel.ep_size, r.config.parallel.attn_dp) for r in runs] == [(1, 1), (2, 1), (2, 2)]
    assert len({r.outputs["digest"] for r in runs}) == 1
    assert len({r.acceptance.accept_length for r in runs if r.acceptance}) == 1  # counted once a replica, added up
    assert len({int(r.step_us()["num_committed"].sum()) for r in runs}) == 1
    assert len({r.name for r in runs}) == 3
    table = lab.ep_table(runs)
    assert list(table["rank"]) == [0, 0, 1, 0, 1]
    spread = table[table["ep_size"] > 1]
    for column in ("step_ms_p50", "wait_us", "dispatch_us", "experts_us", "combine_us", "bytes_a_step", "rows_a_step"):
        assert (spread[column] > 0).all(), column
    assert table["bytes_a_step"].iloc[0] == 0
    assert (spread["imbalance"] >= 1).all()
    # At EP 1 the padded request's rows are computed, above it never.
    rows = table.groupby("name", sort=False)["rows_a_step"].sum()
    assert rows.iloc[1] == rows.iloc[2] < rows.iloc[0]
    assert np.allclose(table["real_share"], [3 / 4, 3 / 4, 3 / 4, 1, 1 / 2])  # 3 of 4; 2 of 2 and 1 of 2


def test_load_and_traffic(runs: list[Run]) -> None:
    one, shared, apart = runs
    for who, layers in (("target", 2), ("drafter", 1)):
        assert expert_load(shared, who).shape == (layers, 8)
        assert np.array_equal(expert_load(shared, who), expert_load(apart, who))
        assert np.array_equal(rows_by_rank(apart, who).sum(1), expert_load(apart, who).sum(1))
    assert imbalance_of(one) is None
    even = imbalance_of(apart)
    assert even is not None
    assert even.mean >= even.bound - 1e-9
    assert traffic_of(shared) is None
    sent = traffic_of(apart)
    assert sent is not None
    assert sent.shape == (2, 2)
    assert (sent > 0).all()
    with pytest.raises(LabError, match="holds no expert load"):
        expert_load(replace(one, ep=[]))


def test_pictures(runs: list[Run], tmp_path: Path) -> None:
    lanes = lab.plot.ep_lanes(runs[2])
    assert [t.name for t in lanes.data] == ["wait", "dispatch", "experts", "combine"]
    assert all(set(t.y) == {"rank 0", "rank 1"} for t in lanes.data)
    heat = lab.plot.expert_heatmap(runs[1:])
    assert len(heat.data) == 2
    assert np.array(heat.data[0].z).shape == (2, 8)
    assert "balanced over 2 ranks: imbalance" in heat.layout.annotations[0].text
    sweep = lab.plot.ep_sweep(runs)
    assert [t.name for t in sweep.data] == ["all_reduce, balanced", "all_to_all, balanced"]
    assert all(len(t.x) == 2 for t in sweep.data)  # from EP 1, which both share
    assert lab.plot.ep_traffic(runs[2]).data[0].z.shape == (2, 2)
    assert "all_to_all" in lab.plot.ep_traffic(runs[1]).layout.annotations[0].text
    again = read_run(runs[2].save(tmp_path / "kept").path)
    assert lab.plot.ep_lanes(again).data[0].base == lanes.data[0].base


def test_mostly_padding_is_told(runs: list[Run]) -> None:
    few = replace(runs[2], ep=[{**part, "real_rows": 0} if part["rank"] else part for part in runs[2].ep])
    assert few.mostly_padding is not None
    assert "under a quarter of the padded ones (rank 1 0%)" in few.mostly_padding
    assert runs[2].mostly_padding is None


@pytest.mark.parametrize(
    ("toggles", "said"),
    [
        ({"attn_dp": 2, "ep_size": 2}, "dispatcher='all_reduce' wants all rows on every rank"),
        ({"attn_dp": 2}, "attn_dp=2 wants every expert whole on one rank"),
        ({"ep_size": 2, "tp_size": 4, "target_num_key_value_heads": 4, "draft_num_key_value_heads": 4, "dispatcher": "all_to_all"},
         "dispatcher='all_to_all' wants every expert whole"),
        ({"ep_size": 8, "dispatcher": "all_to_all", "buckets": (1, 2, 4)}, "no bucket of .* is a multiple of 8"),
        ({"moe_dp": 2}, "moe_dp=2 is not run live"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_told_before_it_starts(toggles: dict, said: str) -> None:
    with pytest.raises(LabError, match=said):
        check_runnable(lab.preset("tiny", device="cpu", **toggles))


def test_a_room_that_is_too_small_ends_the_run(tmp_path: Path, forked_ranks) -> None:
    cfg = lab.preset(
        "tiny",
        device="cpu",
        weights="random",
        batch_size=4,
        ep_size=2,
        attn_dp=2,
        dispatcher="all_to_all",
        capacity_factor=0.3,
    )
    with (
        forked_ranks(),
        pytest.raises(LabError, match=r"dispatcher='all_to_all': \d+ rows found no room .* capacity_factor=0.3"),
    ):
        lab.run(cfg, num_steps=4, profile_steps=0, out=tmp_path / "out")
