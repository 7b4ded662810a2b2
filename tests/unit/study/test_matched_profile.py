"""The matched experiment: from recorded runs, and live in this machine's processes."""

from __future__ import annotations

import pytest

import dspark_lab as lab
from dspark_lab.config.presets import SEED_DIFFERENCES
from dspark_lab.runs.store import load_run
from dspark_lab.study.matched_profile import from_runs


def test_the_recorded_captures_give_the_seeds_table() -> None:
    names = ["h200-moe-none", "h200-moe-blocking", "h200-moe-non_blocking", "h200-tp2-none", "h200-tp2-blocking"]
    made = from_runs([load_run(n) for n in names])
    t = made.table.set_index("name")
    assert t.loc["h200-moe-blocking", "delta_pct"] == pytest.approx(2.19, abs=0.01)
    assert t.loc["h200-moe-blocking", "profiled_delta_pct"] == pytest.approx(7.37, abs=0.05)
    assert t.loc["h200-moe-blocking", "inflation"] == pytest.approx(3.36, abs=0.05)
    assert t.loc["h200-tp2-blocking", "inflation"] == pytest.approx(1.23, abs=0.05)
    assert t.loc["h200-moe-blocking", "lost_us"] == pytest.approx(72, abs=0.1)
    assert t.loc["h200-moe-none", "launch_lead_us_p50"] > 2000 > 0 > t.loc["h200-moe-blocking", "launch_lead_us_p50"]
    assert t.loc["h200-tp2-none", "profiled_step_us_p50_max"] >= t.loc["h200-tp2-none", "profiled_step_us_p50"]
    assert t.loc["h200-moe-non_blocking", "verdict"] == "tie"
    assert {base: k["equal"] for base, k in made.kernels.items()} == {"h200-moe-none": True, "h200-tp2-none": True}
    assert "h200-moe-blocking" in made._repr_html_() or "blocking" in made._repr_html_()


def test_live_on_this_machine_every_arm_has_its_row(tmp_path) -> None:
    made = lab.matched_profile(
        lab.preset("tiny", device="cpu"),
        ["none", "blocking", "on_demand"],
        steps=4,
        processes=2,
        repeats=1,
        out=tmp_path / "o",
    )
    t = made.table.set_index("arm")
    assert list(t.index) == ["none", "blocking", "on_demand"]
    assert t["verdict"].tolist() == ["baseline", "tie", "tie"]
    assert t.loc["blocking", "scalar_host_us_p50"] > 0
    assert t.loc["none", "scalar_host_us_p50"] != t.loc["none", "scalar_host_us_p50"]  # never built
    assert (t["profiled_step_us_p50"] > 0).all()


def test_seed_preset_has_its_workload_and_says_how_it_differs() -> None:
    cfg = lab.preset("seed")
    assert (cfg.engine.prompt_len, cfg.engine.max_new_tokens, cfg.parallel.tp_size, cfg.parallel.ep_size) == (
        16_384,
        2_048,
        2,
        1,
    )
    assert cfg.model.draft.num_hidden_layers == 3
    assert cfg.model.drafter.block_size == 5
    assert len(SEED_DIFFERENCES) >= 4
