"""Sampled, scheduled and compact rounds over ranks: the same tokens and lengths as one rank's."""

from __future__ import annotations

import pytest

import dspark_lab as lab
from dspark_lab.plan.costs import CostWarning


@pytest.mark.parametrize(
    ("toggles", "layouts"),
    [
        ({"temperature": 4.0}, [{"ep_size": 2, "attn_dp": 2, "dispatcher": "all_gather"}]),
        ({"temperature": 4.0, "verify": "scheduled", "layout": "compact", "overlap": True}, [{"tp_size": 2}]),
    ],
    ids=["sampled", "sampled, scheduled, compact"],
)  # fmt: skip
@pytest.mark.filterwarnings(f"ignore::{CostWarning.__module__}.{CostWarning.__name__}")
def test_ranks_do_not_change_what_is_drawn(toggles: dict, layouts: list[dict], tmp_path, forked_ranks) -> None:
    cfg = lab.preset("tiny", device="cpu", batch_size=3, max_new_tokens=20, alloc="on_demand", **toggles)
    with forked_ranks():
        runs = [
            lab.run(cfg.replace(**p), num_steps=8, repeats=1, profile_steps=0, out=tmp_path / str(i))
            for i, p in enumerate([{}, *layouts])
        ]
    assert len({r.outputs["digest"] for r in runs}) == 1
    assert len({r.acceptance.accept_length for r in runs if r.acceptance}) == 1
