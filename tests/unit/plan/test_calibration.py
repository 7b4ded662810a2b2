"""STS and its measures: by hand, against loops written from the formulas, and on confidences made wrong on purpose."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import dspark_lab as lab
from dspark_lab.analysis.calibration import BIN_COLUMNS, COLUMNS
from dspark_lab.errors import LabError
from dspark_lab.plan.calibration import ConfidenceRounds, StsEntry, StsTable, fit_sts, greedy_accepted, load_sts
from dspark_lab.plan.reliability import auc, binned, brier, ece

P, Y = np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 1, 1, 1])


def test_measures_by_hand() -> None:
    assert ece(P, Y, 2) == pytest.approx((2 * 0.4 + 2 * 0.1) / 4)
    assert brier(P, Y) == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert auc(P, Y) == pytest.approx((0.5 + 1 + 1) / 3)
    bins = binned(np.array([0.0, 0.5, 1.0]), np.array([0, 1, 1]), 2)
    assert bins.count.tolist() == [1, 2]
    assert bins.probability.tolist() == [0.0, 1.5]
    assert bins.happened.tolist() == [0, 2]


def test_measures_of_nothing_are_no_numbers() -> None:
    assert math.isnan(auc(P, np.ones(4)))
    assert all(math.isnan(f(np.zeros(0), np.zeros(0))) for f in (ece, brier, auc))
    with pytest.raises(LabError, match="within 0 to 1"):
        ece(np.array([1.5]), np.array([1]))


def test_the_base_rate_has_no_ece_and_tells_nothing() -> None:
    flat = np.full(4, 0.75)
    assert ece(flat, Y) == pytest.approx(0)
    assert auc(flat, Y) == 0.5


def test_auc_against_all_pairs() -> None:
    rng = np.random.default_rng(0)
    p, y = np.round(rng.random(80), 1), rng.random(80) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    assert auc(p, y) == pytest.approx(float(np.mean(pairs)))


def test_the_greedy_label_is_the_matching_prefix() -> None:
    drafts = np.array([[3, 5, 9], [3, 5, 8], [1, 5, 8]])
    target = np.array([[3, 5, 8, 1]] * 3)
    assert greedy_accepted(drafts, target).tolist() == [2, 3, 0]
    rounds = ConfidenceRounds(logits=np.zeros((3, 3)), accepted=greedy_accepted(drafts, target), temperature=0.0)
    assert rounds.happened.tolist() == [[True, True, False], [True, True, True], [False, False, False]]


def synthetic(num: int, seed: int, true=(1.5, 2.0, 2.5), temperature: float = 1.0) -> ConfidenceRounds:
    """Rounds whose conditional acceptance is σ(logit / true): STS should find ``true``."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (num, len(true)))
    survives = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / np.array(true)))
    return ConfidenceRounds(logits=logits, accepted=np.cumprod(survives, axis=1).sum(axis=1), temperature=temperature)


def by_loops(rounds: ConfidenceRounds, grid: list[float], num_bins: int) -> list[float]:
    """The definition, one event at a time."""
    chosen: list[float] = []
    for k in range(rounds.block_size):
        best, best_t = math.inf, 0.0
        for t in sorted(grid, key=lambda t: abs(math.log(t))):
            sums = [[0, 0.0, 0] for _ in range(num_bins)]
            for row, accepted in zip(rounds.logits, rounds.accepted, strict=True):
                p = 1.0
                for logit, scale in zip(row, [*chosen, t], strict=False):
                    p /= 1 + math.exp(-logit / scale)
                b = sums[min(int(p * num_bins), num_bins - 1)]
                b[0], b[1], b[2] = b[0] + 1, b[1] + p, b[2] + int(accepted > k)
            error = sum(n / len(rounds.accepted) * abs(p / n - y / n) for n, p, y in sums if n)
            if error < best - 1e-12:
                best, best_t = error, t
        chosen.append(best_t)
    return chosen


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_fit_against_loops(seed: int) -> None:
    rounds, grid = synthetic(70, seed), [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0]
    fitted = fit_sts(rounds, grid=np.array(grid), num_bins=5).scales(1.0, block_size=3)
    assert fitted.tolist() == by_loops(rounds, grid, 5)


def test_on_a_third_split_it_is_calibrated() -> None:
    fitted, third = fit_sts(synthetic(30_000, 1)), synthetic(30_000, 2)
    assert fitted.scales(1.0, block_size=3) == pytest.approx([1.5, 2.0, 2.5], rel=0.15)
    report = lab.calibration(third, fitted)
    assert tuple(report.columns) == COLUMNS
    assert report["position"].tolist() == [1, 2, 3]
    assert (report["ece_raw"] > 0.02).all()
    assert (report["ece"] < 0.01).all()
    assert (report["brier"] < report["brier_raw"]).all()
    assert report["auc"][0] == pytest.approx(report["auc_raw"][0])  # one position: the order stays
    assert report["accepted_share"].tolist() == pytest.approx(third.happened.mean(axis=0).tolist())
    with pytest.raises(LabError, match="the very rounds"):
        lab.calibration(synthetic(30_000, 1), fitted)


def test_a_reliability_diagram_holds_every_round_once() -> None:
    fitted, third = fit_sts(synthetic(2000, 1)), synthetic(500, 2)
    bins = lab.reliability(third, fitted, num_bins=10)
    assert tuple(bins.columns) == BIN_COLUMNS
    assert (bins.groupby(["stage", "position"])["num_rounds"].sum() == 500).all()
    assert set(bins["stage"]) == {"raw", "sts"}
    assert ((bins["low"] <= bins["confidence"]) & (bins["confidence"] <= bins["high"])).all()
    assert ((bins["accepted_low"] <= bins["accepted_share"]) & (bins["accepted_share"] <= bins["accepted_high"])).all()
    one = bins[(bins["stage"] == "sts") & (bins["position"] == 2)]
    gap = (one["num_rounds"] * (one["confidence"] - one["accepted_share"]).abs()).sum() / 500
    assert gap == pytest.approx(ece(np.cumprod(fitted.confidence(third), axis=1)[:, 1], third.happened[:, 1], 10))
    assert tuple(lab.reliability(synthetic(0, 0)).columns) == BIN_COLUMNS


def test_a_wilson_interval_by_hand() -> None:
    ten = ConfidenceRounds(logits=np.zeros((10, 1)), accepted=np.array([1] * 8 + [0] * 2), temperature=1.0)
    row = lab.reliability(ten, num_bins=2).iloc[0]
    assert (row["accepted_low"], row["accepted_high"]) == (
        pytest.approx(0.4902, abs=1e-4),
        pytest.approx(0.9433, abs=1e-4),
    )


def test_a_table_is_keyed_by_temperature_and_survives_json(tmp_path) -> None:
    table = fit_sts([synthetic(500, 1), synthetic(500, 1, (0.8, 0.8, 0.8), temperature=0.0)])
    assert load_sts(table.save(tmp_path / "sts.json")) == table
    assert table.scales(1.0, block_size=3).tolist() != table.scales(0.0, block_size=3).tolist()
    with pytest.raises(LabError, match=r"temperature=0\.7; it was fitted at \[0.0, 1.0\]"):
        table.scales(0.7, block_size=3)
    with pytest.raises(LabError, match="STS table fit for 3, runtime 5"):
        table.scales(1.0, block_size=5)
    with pytest.raises(LabError, match=r"two collections are at temperature=1\.0"):
        fit_sts([synthetic(5, 1), synthetic(5, 2)])


@pytest.mark.parametrize("bad", ["NaN", "0", "-1.0", "true", '"hot"', "Infinity"])
def test_a_file_with_temperatures_that_are_none_is_refused(tmp_path, bad: str) -> None:
    path = fit_sts(synthetic(50, 1)).save(tmp_path / "sts.json")
    d = json.loads(path.read_text())
    d["entries"][0]["scales"][1] = "HERE"
    path.write_text(json.dumps(d).replace('"HERE"', bad))
    with pytest.raises(LabError, match=r"sts\.json: STS table holds"):
        load_sts(path)


def test_collections_that_cannot_be_fitted_are_refused_by_name() -> None:
    sound = {"logits": np.zeros((2, 3)), "accepted": np.array([1, 3]), "temperature": 1.0}
    with pytest.raises(LabError, match="non-identity table"):
        fit_sts(ConfidenceRounds(**sound, applied=(1.0, 1.2, 1.0)))
    assert fit_sts(ConfidenceRounds(**sound, applied=(1.0, 1.0, 1.0))).block_size == 3
    with pytest.raises(LabError, match="1 of 2 STS rounds verified fewer than 3 drafts"):
        fit_sts(ConfidenceRounds(**sound, verified=np.array([3, 2])))
    with pytest.raises(LabError, match="block_size=5 beside 3"):
        fit_sts(
            [
                ConfidenceRounds(**sound),
                ConfidenceRounds(logits=np.zeros((1, 5)), accepted=np.array([0]), temperature=0.0),
            ]
        )
    with pytest.raises(LabError, match="NaN"):
        ConfidenceRounds(**(sound | {"logits": np.full((2, 3), np.nan)}))
    with pytest.raises(LabError, match="accepted goes from 1 to 4"):
        ConfidenceRounds(**(sound | {"accepted": np.array([1, 4])}))
    with pytest.raises(LabError, match="temperature=-1"):
        ConfidenceRounds(**(sound | {"temperature": -1}))
    with pytest.raises(LabError, match="has 1 positions"):
        StsTable(block_size=3, entries={1.0: StsEntry(scales=(1.0,), num_rounds=1, digest="")})


def test_confidences_after_the_sigmoid_are_taken_back() -> None:
    c = np.array([[0.2, 0.5, 1.0]])
    rounds = ConfidenceRounds.of_confidence(c, np.array([1]), temperature=1.0)
    assert rounds.confidence == pytest.approx(c, abs=1e-7)
