"""The panel's toggles of drafting: who drafts, on what text, sampled how, and how much of it is verified."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_lab.config.shipped import DRAFTERS
from dspark_lab.errors import LabError
from dspark_lab.view.panel import Panel, panel
from dspark_lab.view.panel.snippet import live_code


def live(**toggles: Any) -> Panel:
    return panel(source="live", strict=True, **toggles)


def test_a_preset_with_one_drafter_says_so() -> None:
    p = live(preset="tiny")
    assert p.toggles["drafter"].control.disabled
    assert p.toggles["drafter"].reason == "preset tiny has one drafter; shipped has 7"
    assert p.config.engine.text == "random"


def test_the_trained_drafters_are_offered_and_change_what_can_be_verified() -> None:
    p = live(preset="shipped")
    t = p.toggles
    assert t["drafter"].offered == list(DRAFTERS)
    assert (t["text"].value, p.config.engine.text) == ("mixed", "mixed")
    assert p.config.model.drafter_path == "shipped:dspark-rnn"
    t["drafter"].value = "eagle3"
    assert p.config.model.drafter.drafter_kind == "eagle3"
    assert t["verify"].offered == ["static"]
    assert "needs a confidence head" in t["verify"].reason
    t["drafter"].value = "dspark-gated"
    t["verify"].value = "scheduled"
    t["layout"].value = "compact"
    t["temperature"].value = 0.8
    t["text"].value = "code"
    cfg = p.config
    assert (cfg.engine.verify, cfg.engine.layout, cfg.engine.temperature, cfg.engine.text) == (
        "scheduled",
        "compact",
        0.8,
        "code",
    )
    assert cfg.model.drafter.markov_head == "gated"
    t["preset"].value = "tiny"
    assert p.config.model.weights == "bigram"
    assert p.config.engine.text == "random"


def test_a_live_panel_starts_with_the_trained_pair_and_the_text_named() -> None:
    assert live().config.model.drafter_path == "shipped:dspark-rnn"
    assert live().config.engine.text == "mixed"
    assert live(text="random").config.engine.text == "random"


def test_the_lines_to_copy_make_the_same_config() -> None:
    p = live(preset="shipped", drafter="dspark", temperature=0.5)
    board = p.board
    text = live_code(
        board.asked.base, changes=board.changes(), arms=["none"], options={}, baseline="none", tab="Latency"
    )
    line = next(line for line in text.splitlines() if line.startswith("cfg ="))
    assert line.startswith("cfg = lab.shipped('dspark', alloc='none'")
    import dspark_lab as lab

    made: dict[str, Any] = {"lab": lab}
    exec(line, made)
    assert made["cfg"] == board.config()


def test_a_temperature_that_is_none_is_named() -> None:
    with pytest.raises(LabError, match=r"temperature=-1\.0 is neither 0"):
        live(temperature=-1.0)
