"""SPS profiles: to JSON and back, the tables made of them, and which do not match."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspark_lab.config import preset
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import AdditiveTable
from dspark_lab.plan.fit import nonnegative_least_squares
from dspark_lab.plan.sps import SpsProfile, load_sps, recorded_costs

TINY = preset("tiny", block_size=3)
TRUE = AdditiveTable(
    bias_s=1e-3, requests=(1, 2, 4), alpha_s=(0.0, 2e-4, 5e-4), tokens=(1, 4, 16), theta_s=(0.0, 3e-4, 9e-4)
)
POINTS = [(r, r * w) for r in (1, 2, 4) for w in (1, 2, 3, 4)]


def profile(**change) -> SpsProfile:
    values = {
        "requests": tuple(r for r, _ in POINTS),
        "tokens": tuple(b for _, b in POINTS),
        "seconds": tuple(float(TRUE.seconds_at(r, [b])[0]) for r, b in POINTS),
        "block_size": 3,
        "config": TINY.to_dict(),
        "environment": {"device_name": "CPU (test)", "torch": "2.13"},
    }
    return SpsProfile(**(values | change))


def test_to_json_and_back(tmp_path) -> None:
    made = profile()
    path = made.save(tmp_path / "deep" / "sps.json")
    assert load_sps(path) == made
    assert load_sps(path).environment["device_name"] == "CPU (test)"
    assert [p.name for p in path.parent.iterdir()] == ["sps.json"]


def test_an_additive_table_is_found_again_where_the_times_are_one() -> None:
    made = profile().additive()
    for r, b in POINTS:
        assert made.seconds_at(r, [b])[0] == pytest.approx(TRUE.seconds_at(r, [b])[0])
    assert profile().misfit(made) < 1e-9


def test_noise_does_not_make_more_work_cheaper() -> None:
    noisy = profile(seconds=tuple(np.asarray(profile().seconds) * np.resize([1.2, 0.8, 1.0], len(POINTS))))
    made = noisy.additive()
    assert (np.diff(made.theta_s) >= 0).all()
    assert (np.diff(made.alpha_s) >= 0).all()
    assert 0.01 < noisy.misfit(made) < 0.3


def test_least_squares_at_least_zero() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.normal(size=(8, 4)), rng.normal(size=8)
        x = nonnegative_least_squares(a, b)
        slope = a.T @ (b - a @ x)
        assert (x >= 0).all()
        assert (slope <= 1e-8).all()  # no unknown wants to rise,
        assert np.abs(slope[x > 0]).max(initial=0) < 1e-8  # and none above 0 to move: the optimum of a convex problem


def test_points_that_do_not_tie_requests_and_tokens_together_are_refused() -> None:
    apart = profile(requests=(1, 1, 100, 100), tokens=(1, 4, 100, 400), seconds=(1.0, 2.0, 3.0, 4.0))
    with pytest.raises(LabError, match="do not tie"):
        apart.additive()
    assert apart.step_table(100).tokens == (100, 400)
    assert apart.step_table().seconds == (1.0, 2.0, 3.0, 4.0)


def test_a_step_table_is_of_one_number_of_requests() -> None:
    assert profile().step_table(2).tokens == (2, 4, 6, 8)
    with pytest.raises(LabError, match="2 tokens were measured at several"):
        profile().step_table()
    with pytest.raises(LabError, match="num_requests=3 was not measured; there are"):
        profile().step_table(3)


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "0.0", "-0.001", '"fast"', "null"])
def test_a_file_with_times_that_are_none_is_refused(tmp_path, bad: str) -> None:
    path = profile().save(tmp_path / "sps.json")
    d = json.loads(path.read_text())
    d["seconds"][2] = "HERE"
    path.write_text(json.dumps(d).replace('"HERE"', bad))
    with pytest.raises(LabError, match=r"sps\.json: seconds holds"):
        load_sps(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "sts_table"}, "is no sps_profile: it says 'sts_table'"),
        ({"schema": 9}, "schema 9"),
        ({"tokens": [1]}, "one value a point"),
        ({"speed": 3}, "is no SPS profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, change, text) -> None:
    path = profile().save(tmp_path / "sps.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LabError, match=text):
        load_sps(path)


def test_points_that_cannot_be_are_refused() -> None:
    with pytest.raises(LabError, match="9 tokens for 2 requests cannot be: with block_size=3"):
        profile(requests=(2,), tokens=(9,), seconds=(1.0,))
    with pytest.raises(LabError, match="twice"):
        profile(requests=(2, 2), tokens=(8, 8), seconds=(1.0, 1.0))


@pytest.mark.parametrize(
    ("toggles", "text"),
    [
        ({"block_size": 5}, "SPS profile for block_size=3, runtime 5"),
        ({"dtype": "bfloat16"}, "dtype='float32', and this config has 'bfloat16'"),
        ({"target_num_hidden_layers": 3}, "target_num_hidden_layers=2, and this config has 3"),
        ({"ep_size": 2}, "ep_size=1"),
    ],
)
def test_a_profile_of_something_else_is_refused(toggles, text) -> None:
    with pytest.raises(LabError, match=text):
        profile().check_matches(TINY.replace(**toggles), "CPU (test)")


def test_a_profile_matches_its_config_whatever_the_load() -> None:
    profile().check_matches(TINY.replace(batch_size=2, seed=3, alloc="persistent"), "CPU (test)")
    with pytest.raises(LabError, match=r"measured on 'CPU \(test\)', and this is 'NVIDIA H200'"):
        profile().check_matches(TINY, "NVIDIA H200")


@pytest.mark.parametrize("name", ["shipped", "small", "qwen3-30b-a3b"])
def test_recorded_costs_ship(name: str) -> None:
    costs = recorded_costs(name)
    assert costs.source == "recorded"
    assert costs.environment["device_name"] == "NVIDIA H200"
    assert costs.block_size == 7
    assert max(costs.requests) == 256
    assert max(costs.tokens) == 2048
    assert costs.config["preset"] == name
    if name != "shipped":  # float32 products of a small model pick kernels by shape: no rising table fits them
        assert costs.misfit(costs.additive()) < 0.1


def test_costs_that_do_not_ship_are_named() -> None:
    with pytest.raises(LabError, match="recorded costs='smal' is not known; legal: qwen3-30b-a3b, shipped, small"):
        recorded_costs("smal")
