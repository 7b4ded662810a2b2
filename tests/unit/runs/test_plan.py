"""Which arms share a process group, which share a code path, what is measured twice."""

from __future__ import annotations

import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError
from dspark_lab.runs.plan import arm_name, expand, group, path_key, pick_baseline
from dspark_lab.runs.spec import JobSpec

TINY = preset("tiny", device="cpu")
ARMS = ["none", "blocking", "non_blocking", "on_demand"]


def test_expand_is_the_product() -> None:
    configs = expand(TINY, {"batch_size": [1, 2], "alloc": ["none", "blocking"]})
    assert [(c.engine.batch_size, c.engine.alloc) for c in configs] == [
        (1, "none"), (1, "blocking"), (2, "none"), (2, "blocking")]  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "said"), [({"alloc": "none"}, r"alloc=\['none'\]"), ({"alloc": []}, "nothing to run")]
)
def test_an_axis_is_a_list(axes: dict, said: str) -> None:
    with pytest.raises(LabError, match=said):
        expand(TINY, axes)


def test_guarded_arms_share_the_path_of_none_at_ep_1_and_of_their_transfer_at_ep_2() -> None:
    at = {
        n: {a: path_key(TINY.replace(ep_size=n, alloc=a)) for a in ("non_blocking", "on_demand", "persistent")}
        for n in (1, 2)
    }
    none = path_key(TINY.replace(alloc="none"))
    assert at[1]["on_demand"] == at[1]["persistent"] == none != at[1]["non_blocking"]
    assert at[2]["on_demand"] == at[2]["non_blocking"] != at[2]["persistent"]


def test_equal_paths_run_once_and_the_baseline_twice() -> None:
    (g,) = group(expand(TINY, {"alloc": ARMS}))
    assert [(a.config.engine.alloc, a.role) for a in g.arms] == [
        ("none", "arm"), ("blocking", "arm"), ("non_blocking", "arm"), ("none", "aa")]  # fmt: skip
    assert [(a.config.engine.alloc, shared) for a, shared in g.aliases] == [("on_demand", "tiny-ep1-bs4-none")]


def test_world_sizes_are_groups_of_their_own() -> None:
    groups = group(expand(TINY, {"ep_size": [1, 2], "alloc": ["blocking", "persistent"]}))
    assert [{a.config.parallel.ep_size for a in g.arms} for g in groups] == [{1}, {2}]


def test_baseline_is_the_floor_then_none_then_the_first() -> None:
    floor = TINY.replace(ep_size=2, alloc="none", mask_padding=False)
    blocking = TINY.replace(ep_size=2, alloc="blocking")
    assert pick_baseline([blocking, floor]) == floor
    assert pick_baseline([TINY.replace(alloc="blocking"), TINY.replace(alloc="none")]).engine.alloc == "none"
    assert pick_baseline([blocking]) == blocking


def test_names_are_unique_folder_names() -> None:
    configs = expand(TINY, {"seed": [0, 1], "alloc": ["pinned:always", "none"]})
    names = [a.name for g in group(configs) for a in g.arms]
    assert len(set(names)) == len(names)
    assert all("/" not in n and ":" not in n for n in names)
    assert arm_name(TINY.replace(ep_size=2)) == "tiny-ep2-bs4-on_demand"


def test_order_is_counterbalanced_over_blocks_and_processes() -> None:
    (g,) = group(expand(TINY, {"alloc": ["none", "blocking", "non_blocking"]}))
    spec = [JobSpec(arms=g.arms, process=p) for p in (0, 1)]
    assert spec[0].order(0) == [0, 1, 2, 3]
    assert spec[0].order(1) == [3, 2, 1, 0]
    assert spec[1].order(0) == [1, 2, 3, 0]


def test_spec_survives_its_file(tmp_path) -> None:
    (g,) = group(expand(TINY, {"alloc": ARMS}))
    spec = JobSpec(arms=g.arms, num_steps=7, process=2)
    spec.save(tmp_path)
    assert JobSpec.load(tmp_path) == spec
