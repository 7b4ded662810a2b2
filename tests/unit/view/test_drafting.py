"""Figures on drafting: what is drawn is what the tables say."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError
from dspark_lab.study.evaluation import ROW_COLUMNS


@pytest.fixture
def found() -> lab.Evaluation:
    """Two drafters, two kinds, γ 1 and 2, with a threshold and without; two prompts each."""
    rng = np.random.default_rng(0)
    rows = []
    for drafter in ("one", "two"):
        for kind in ("code", "prose"):
            for gamma, threshold in ((1, 0.0), (2, 0.0), (2, 0.5)):
                for prompt in range(2):
                    lengths = rng.integers(1, gamma + 2, 12)
                    rows.append(
                        {
                            "drafter": drafter, "kind": kind, "temperature": 0.0, "block_size": gamma, "threshold": threshold, "prompt": prompt,
                            "num_rounds": 12, "num_tokens": int(lengths.sum()), "accepted": np.bincount(lengths - 1, minlength=gamma + 1).tolist(),
                            "num_verified": 12 * gamma, "seconds": 0.1, "num_steps": 12, "loop_share": 0.0, "ended": "length", "tokens": [65],
                            "lengths": lengths.tolist(), "confidence": rng.uniform(0.05, 0.95, (12, gamma)).tolist(),
                        }
                    )  # fmt: skip
    return lab.Evaluation(
        rows=pd.DataFrame(rows, columns=list(ROW_COLUMNS)), device_name="CPU (test)", max_new_tokens=24, batch_size=2
    )


def only(found: lab.Evaluation, query: str) -> lab.Evaluation:
    return lab.Evaluation(
        rows=found.rows.query(query).reset_index(drop=True), device_name="CPU (test)", max_new_tokens=24, batch_size=2
    )


def test_positions_a_panel_a_kind_and_a_line_a_drafter(found):
    part = only(found, "block_size == 2 and threshold == 0")
    figure = lab.plot.accepted_by_position(part)
    assert [a.text for a in figure.layout.annotations] == ["code", "prose"]
    assert sorted({t.name for t in figure.data}) == ["one", "two"]
    table = part.positions().query("drafter == 'two' and kind == 'prose'")
    (line,) = [t for t in figure.data if t.name == "two" and t.xaxis == "x2"]
    np.testing.assert_allclose(line.y, table["accepted_share"])
    np.testing.assert_allclose(line.y + line.error_y.array, table["high"])
    assert "measured · CPU (test)" in figure.layout.title.text


def test_sweeps_over_block_size_and_threshold(found):
    sweep = lab.plot.accept_length_sweep(only(found, "threshold == 0"))
    assert {tuple(t.x) for t in sweep.data} == {(1, 2)}
    cut = lab.plot.accept_length_sweep(only(found, "block_size == 2"), by="threshold")
    lengths = [t for t in cut.data if t.yaxis in ("y", "y2")]
    rates = [t for t in cut.data if t.yaxis in ("y3", "y4")]
    assert len(lengths) == len(rates) == 4
    assert max(max(t.y) for t in rates) <= 1
    one = lab.plot.accept_length_sweep(only(found, "block_size == 2"), by="temperature")
    assert "Only one temperature was measured" in one.layout.annotations[0].text
    with pytest.raises(LabError, match="by='gamma' is not known"):
        lab.plot.accept_length_sweep(found, by="gamma")


def test_reliability_before_and_after(found):
    part = only(found, "block_size == 2 and threshold == 0 and drafter == 'one'")
    table = lab.fit_sts(part.confidence_rounds(prompts=slice(0, 1)))
    bins = lab.reliability(part.confidence_rounds(prompts=slice(1, None)), table)
    figure = lab.plot.reliability(bins, label=part.label)
    assert [a.text for a in figure.layout.annotations] == ["the first draft", "the first 2 drafts"]
    drawn = [t for t in figure.data if t.mode == "markers"]
    assert {t.name for t in drawn} == {"as the head gives it", "after STS"}
    assert sum(len(t.x) for t in drawn) == len(bins)
    assert "24 rounds" in figure.layout.title.text
    with pytest.raises(LabError, match="there are 1 to 2"):
        lab.plot.reliability(bins, positions=[3])


def test_the_budget_counts_the_anchor():
    table = pd.DataFrame(
        {"num_requests": [1, 8], "verify_len": [6.5, 3.0], "best_length": [7, 2], "accept_length": [4.0, 2.5]}
    )
    figure = lab.plot.verify_budget(table, label="a table")
    lines = {t.name: list(t.y) for t in figure.data}
    assert lines["verified by the scheduler"] == [6.5, 3.0]
    assert lines["best fixed length in hindsight"] == [8, 3]
    assert "simulated" in figure.layout.title.text


def test_nothing_to_draw_is_said(found):
    empty = only(found, "drafter == 'none'")
    assert "No rounds" in lab.plot.accepted_by_position(empty).layout.annotations[0].text
    assert "No load" in lab.plot.verify_budget(pd.DataFrame()).layout.annotations[0].text


@pytest.mark.parametrize(
    ("figure", "lacks"),
    [
        ("accepted_by_position", "kind"),
        ("accept_length_sweep", "block_size"),
        ("reliability", "position"),
        ("verify_budget", "num_requests"),
        ("depth_sweep", "kind"),
    ],
)
def test_a_table_of_something_else_is_named(figure, lacks):
    draw = getattr(lab.plot, figure)
    with pytest.raises(LabError, match=rf"the table has no column '{lacks}' \(it has a\); give what lab\..* returned"):
        draw(pd.DataFrame({"a": [1]}))
    with pytest.raises(LabError, match="3 is no table"):
        draw(3)
