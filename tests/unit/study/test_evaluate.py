"""`evaluate` on the shipped models: combinations, identity, loops, rounds for STS, files, and stopping."""

from __future__ import annotations

import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError

SHORT = {"num_prompts": 2, "max_new_tokens": 16, "batch_size": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def found() -> lab.Evaluation:
    return lab.evaluate(
        ["dspark-rnn", "dflash"], kinds=["code", "prose"], temperatures=(0.0, 1.0), block_sizes=(3,), **SHORT
    )


def test_a_row_a_combination(found):
    table = found.table()
    assert len(table) == 8
    assert set(table["block_size"]) == {3}
    assert (table["num_prompts"] == 2).all()
    assert ((table["accept_length"] >= 1) & (table["accept_length"] <= 4)).all()
    assert ((table["low"] <= table["accept_length"]) & (table["accept_length"] <= table["high"])).all()
    assert (table["round_ms"] > 0).all()
    assert table["label"].str.contains("measured · ").all()


def test_accept_length_is_one_and_the_positions(found):
    sums = found.positions().groupby(["drafter", "kind", "temperature"])["accepted_share"].sum()
    table = found.table().set_index(["drafter", "kind", "temperature"])["accept_length"]
    pd.testing.assert_series_equal((1 + sums).sort_index(), table.sort_index(), check_names=False)


def test_looping_prompts_are_told_apart(found):
    rows = found.rows.copy()
    rows.loc[rows.index[0], "loop_share"] = 0.9
    first = lab.Evaluation(rows=rows, device_name="CPU", max_new_tokens=16, batch_size=2).table().iloc[0]
    other = rows.iloc[1]
    assert first["num_looping"] == 1
    assert first["accept_length_plain"] == other["num_tokens"] / other["num_rounds"]


def test_rounds_for_sts(found):
    rounds = found.confidence_rounds("dspark-rnn", temperature=1.0)
    rows = found.rows[(found.rows["drafter"] == "dspark-rnn") & (found.rows["temperature"] == 1.0)]
    assert rounds.logits.shape == (rows["num_rounds"].sum(), 3)
    assert rounds.accepted.sum() == (rows["num_tokens"] - rows["num_rounds"]).sum()
    part = found.confidence_rounds("dspark-rnn", temperature=1.0, prompts=slice(0, 1))
    assert 0 < len(part.accepted) < len(rounds.accepted)
    assert lab.fit_sts(rounds).block_size == 3
    with pytest.raises(LabError, match=r"temperature \[0\.0, 1\.0\] are here"):
        found.confidence_rounds("dspark-rnn")
    with pytest.raises(LabError, match="no rounds with confidence"):
        found.confidence_rounds("dflash", temperature=0.0)


def test_saved_and_read_again(found, tmp_path):
    again = lab.load_evaluation(found.save(tmp_path / "evaluation.json"))
    assert again.source == "recorded"
    pd.testing.assert_frame_equal(again.table().drop(columns="label"), found.table().drop(columns="label"))
    rounds = again.confidence_rounds("dspark-rnn", temperature=0.0)
    assert rounds.accepted.tolist() == found.confidence_rounds("dspark-rnn", temperature=0.0).accepted.tolist()
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(LabError, match="is no evaluation"):
        lab.load_evaluation(tmp_path / "none.json")


def test_it_can_be_stopped():
    seen = []
    part = lab.evaluate(
        kinds=["code", "prose"], should_stop=lambda: True, on_progress=lambda *at: seen.append(at), **SHORT
    )
    assert seen == [(1, 2)]
    assert not part.complete
    assert set(part.rows["kind"]) == {"code"}
    assert "stopped early" in part.label


def test_own_prompts_and_configs():
    mine = {"greeting": [list(b"Good morning, ")]}
    part = lab.evaluate({"mine": lab.shipped("dspark")}, kinds=mine, thresholds=(0.9,), **SHORT)
    row = part.table().iloc[0]
    assert (row["drafter"], row["kind"], row["num_prompts"]) == ("mine", "greeting", 1)
    assert row["verified_a_round"] < 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": "dspark-x"}, "drafter='dspark-x' is not known"),
        ({"drafters": {"x": 3}}, "is no LabConfig"),
        ({"drafters": []}, "no drafter to evaluate"),
        ({"drafters": {"x": lab.shipped(simulated_accept_length=2.0)}}, "simulated_accept_length"),
        ({"kinds": ["poems"]}, "kind='poems'"),
        ({"kinds": []}, "no prompts"),
        ({"block_sizes": [9]}, "block_size=9 is over that of 'dspark-rnn', 7"),
        ({"temperatures": [-1.0]}, r"temperature=-1\.0"),
        ({"drafters": "dflash", "thresholds": [0.5]}, "needs a confidence head"),
        ({"num_prompts": 0}, "num_prompts=0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options, message):
    with pytest.raises(LabError, match=message):
        lab.evaluate(**{**SHORT, **options})
