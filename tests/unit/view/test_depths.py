"""Accept length over depth: the table from notes, and the figure of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError


def note(layers: int, code: list[float], prose: list[float]) -> dict[str, Any]:
    """What ``make.py depth`` writes, of texts that are equally long."""
    text = {k: {"accept_length": len(v) / sum(1 / x for x in v), "by_text": v} for k, v in (("code", code), ("prose", prose))}  # fmt: skip
    return {
        "num_layers": layers, "trained_parameters": 100 * layers, "device": "Test GPU", "text": text,
        "recipe": {"num_steps": 2000, "peak_lr": 0.004, "seed": 0},
    }  # fmt: skip


@pytest.fixture
def notes() -> dict[str, Any]:
    return {
        "dflash@depth1@seed0": note(1, [2.0, 2.0], [3.0, 3.0]),
        "dspark-rnn@depth1@seed0": note(1, [2.0, 4.0], [3.0, 6.0]),
        "dspark-rnn@depth1@seed1": note(1, [3.0, 4.0], [4.0, 6.0]),
        "dspark-rnn@depth3@seed0": note(3, [4.0, 4.0], [6.0, 6.0]),
    }


def test_a_row_a_drafter_depth_and_kind(notes, tmp_path):
    table = lab.depth_table(notes)
    assert list(table["drafter"].unique()) == ["dspark-rnn", "dflash"]
    assert list(table["kind"])[:3] == ["code", "prose", "mean"]
    by = table.set_index(["drafter", "num_layers", "kind"])
    deep = by.loc[("dspark-rnn", 3, "mean")]
    assert (deep["accept_length"], deep["low"], deep["high"]) == (5.0, 5.0, 5.0)  # all texts alike
    flat = by.loc[("dspark-rnn", 1, "code")]
    assert flat["by_seed"] == pytest.approx([8 / 3, 24 / 7])
    assert flat["accept_length"] == pytest.approx((8 / 3 + 24 / 7) / 2)
    assert flat["low"] == pytest.approx(2.5)  # the first text both times
    assert flat["high"] == pytest.approx(4.0)
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"shipped": {}, "depth": notes}))
    assert lab.depth_table(path).equals(table)


def test_a_line_a_drafter_with_seeds_beside(notes):
    table = lab.depth_table(notes)
    figure = lab.plot.depth_sweep(table)
    assert [a.text for a in figure.layout.annotations] == ["code", "prose", "mean of the 2"]
    (line,) = [t for t in figure.data if t.name == "dspark-rnn" and t.xaxis == "x3"]
    assert list(line.x) == [1, 3]
    expected = table.query("drafter == 'dspark-rnn' and kind == 'mean'")
    assert list(line.y) == list(expected["accept_length"])
    seeds = [t for t in figure.data if t.xaxis == "x" and t.hovertemplate.startswith("one seed")]
    assert [list(t.x) for t in seeds] == [[1, 1]]
    assert [(s.y0, s.line.dash) for s in figure.layout.shapes] == [
        (2.0, "dot"),
        (3.0, "dot"),
        (2.5, "dot"),
    ]  # dflash has one depth
    assert "recorded · Test GPU" in figure.layout.title.text
    assert "up to 2 seeds" in figure.layout.title.text


def test_without_depths_it_is_said(notes):
    with pytest.raises(LabError, match=r"make\.py depth measures them"):
        lab.depth_table({"dflash@0.004@0": notes["dflash@depth1@seed0"]})
    with pytest.raises(LabError, match="is no file"):
        lab.depth_table("nowhere.json")
    assert "No depth" in lab.plot.depth_sweep(lab.depth_table(notes).iloc[:0]).layout.annotations[0].text


def test_the_depths_that_ship():
    table = lab.depth_table()
    counts = table[table["kind"] == "mean"].groupby("drafter")["num_layers"].apply(list).to_dict()
    assert counts == {"dspark-rnn": [1, 2, 3, 4], "dspark": [1, 2, 3, 4], "dspark-rank0": [1, 2, 3, 4], "dflash": [1, 2, 3, 4], "eagle3": [1]}  # fmt: skip
    assert set(table["num_seeds"]) == {2}
    assert table["accept_length"].between(table["low"], table["high"]).all()  # texts' lengths give the totals
