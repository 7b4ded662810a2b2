"""The tab Tokens: a prompt continued with the toggles of the panel, looked at token by token; what cannot be continued says why."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

import dspark_lab as lab
from dspark_lab.engine import generate as engine
from dspark_lab.engine.generate import Generated
from dspark_lab.errors import LabError
from dspark_lab.view.panel import Panel, panel
from dspark_lab.view.panel.continuing import HELD_OUT, TYPED, check, continuation, prompt_of


def live(*, strict: bool = True, **toggles: Any) -> tuple[Panel, Any]:
    p = panel(source="live", strict=strict, **{"preset": "shipped", "device": "cpu"} | toggles)
    p.tab = "Tokens"
    return p, p._tabs["Tokens"]


def test_a_prompt_is_continued_with_the_toggles_and_the_lines_to_copy_give_the_same() -> None:
    p, tab = live(drafter="dspark", text="code", verify="threshold", confidence_threshold=0.4, block_size=5)
    assert "press Continue" in tab.said.value
    tab.number.value, tab.new.value = 2, 16
    tab.go.click()
    p.wait(60)
    prompt = lab.held_out("code")[2]
    assert tab.generated.tokens[: len(prompt)] == prompt
    assert len(tab.generated.tokens) == len(prompt) + 16
    assert p.figure.table["outcome"].isin(("unverified",)).any()
    assert p.figure.table["position"].max() <= 6  # γ 5 and the bonus
    assert "measured here, " in p.figure.label
    assert "on CPU (" in p.figure.label
    assert "dspark continues held-out code 2: γ 5, verify threshold 0.4, greedy" in tab.page.value
    assert f"{len(tab.generated.rounds)} rounds, accept length" in tab.page.value
    made: dict[str, Any] = {}
    exec(p.code, made)
    assert made["made"].tokens == tab.generated.tokens
    p.toggles["confidence_threshold"].value = 0.0
    assert "other settings" in tab.said.value


def test_refused_drafts_come_and_go_without_another_generation() -> None:
    p, tab = live()
    tab.new.value = 12
    tab.go.click()
    p.wait(60)
    made = tab.generated
    assert 'class="rejected"' in tab.page.value
    tab.drafts.value = False
    assert 'class="rejected"' not in tab.page.value
    assert 'class="accepted"' in tab.page.value
    assert tab.generated is made


def test_a_typed_text_is_continued_and_the_seed_names_what_is_drawn() -> None:
    p, tab = live(temperature=1.0, seed=7)
    assert tab.seed.value == 7
    tab.place.value, tab.typed.value, tab.new.value = "typed text", "And God said, é", 12
    texts = []
    for seed in (7, 8, 7):
        tab.seed.value = seed
        tab.go.click()
        p.wait(60)
        texts.append(tab.generated.tokens)
    assert bytes(texts[0]).decode(errors="replace").startswith("And God said, é")
    assert texts[0] == texts[2] != texts[1]
    assert "temperature 1, seed 7" in p.figure.title


def test_without_drafts_it_says_so_and_shows_the_text() -> None:
    p, tab = live(speculate=False)
    tab.new.value = 8
    tab.go.click()
    p.wait(60)
    assert p.figure is None
    assert "Without drafts there are no rounds to look at: each of these 8 tokens" in tab.page.value
    assert "no speculation" in tab.page.value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"new": 0}, "new tokens 0 cannot be: legal are 1 to 671, what the context of 1024 leaves"),
        ({"new": 1000}, "new tokens 1000 cannot be: legal are 1 to 671, what the context of 1024 leaves"),
        ({"number": 288}, "prompt number 288 is none of text='mixed'; legal: 0 to 287"),
        ({"text": "code", "number": 96}, "prompt number 96 is none of text='code'; legal: 0 to 95"),
        ({"number": -1}, "prompt number -1 is none"),
        ({"seed": -1}, "seed=-1 is not a whole number of at least 0"),
        ({"place": TYPED}, "the typed text is empty, '', and has nothing to continue; type at least one"),
        ({"place": TYPED, "typed": "é" * 512}, "a typed text has 1024 tokens (bytes), and the context holds 1024 with what is new; legal: 1 to 1023"),
        ({"text": "random"}, "text='random' is no text: ids drawn at random; legal: mixed, arithmetic, code, prose; choose one"),
        ({"preset": "tiny"}, "preset='tiny' writes no text: its weights are bigram, not trained; legal: shipped; choose"),
        ({"preset": "small"}, "preset='small' writes no text: its weights are random"),
        ({"ep_size": 2}, "ep_size=2 takes 2 processes, and this tab continues a text in the notebook's own; legal: ep_size=1"),
        ({"tp_size": 2}, "tp_size=2 takes 2 processes"),
        ({"simulated_accept_length": 2.0}, "simulated_accept_length=2.0 accepts by lot"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_named_with_what_can(change: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"place": HELD_OUT, "text": "mixed", "number": 0, "typed": "", "new": 8, "seed": 0} | change
    toggles = {
        n: v for n, v in change.items() if n not in ("place", "text", "number", "typed", "new", "seed", "preset")
    }

    def asks() -> None:
        cfg = lab.preset(change.get("preset", "shipped"), **toggles)
        check(cfg)
        prompt = prompt_of(asked["place"], text=asked["text"], number=asked["number"], typed=asked["typed"])
        continuation(cfg, prompt, max_new_tokens=asked["new"], seed=asked["seed"])

    with pytest.raises(LabError, match=re.escape(said)) as refused:
        asks()
    assert "\n" not in str(refused.value)


def test_what_fits_exactly_is_taken_and_mixed_takes_the_kinds_in_turn() -> None:
    cfg = lab.preset("shipped")
    typed = prompt_of(TYPED, text="random", number=-5, typed="x" * 1000)
    assert continuation(cfg, typed, max_new_tokens=24, seed=0).max_new_tokens == 24
    with pytest.raises(LabError, match="legal are 1 to 24"):
        continuation(cfg, typed, max_new_tokens=25, seed=0)
    names = [prompt_of(HELD_OUT, text="mixed", number=n, typed="").name for n in (0, 1, 2, 287)]
    assert names == ["held-out arithmetic 0", "held-out code 0", "held-out prose 0", "held-out prose 95"]


def test_a_fault_is_red_and_nothing_typed_is_lost() -> None:
    p, tab = live(strict=False)
    tab.place.value, tab.typed.value, tab.new.value, tab.seed.value = TYPED, "And ", 5000, 3
    for fault in (
        "new tokens 5000 cannot be",
        "preset='tiny' writes no text",
        "source='recorded' has no text: recordings keep",
    ):
        if "tiny" in fault:
            p.toggles["preset"].value = "tiny"
        if "recorded" in fault:
            p.source = "recorded"
        tab.go.click()
        assert fault in str(p.errors[-1])
        assert fault.replace("'", "&#x27;") in p.guard.widget.value
        assert not tab.work.running
    assert (tab.place.value, tab.typed.value, tab.new.value, tab.seed.value) == (TYPED, "And ", 5000, 3)
    assert "Nothing can be continued now: source=" in tab.said.value


def test_it_shows_progress_stops_and_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    p, tab = live()
    ended = threading.Event()

    def endless(cfg: Any, prompts: Any, *, on_progress: Any, **_: Any) -> Any:
        try:
            while True:
                on_progress(24, 96)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(engine, "generate", endless)
    tab.page.value = "what was shown"
    tab.go.click()
    for _ in range(500):
        if "24 of 96 tokens, 25%" in tab.work.status.value:
            break
        time.sleep(0.02)
    assert "24 of 96 tokens, 25%" in tab.work.status.value
    with pytest.raises(LabError, match="the tab Tokens still writes"):
        p.run()
    tab.work.stop_button.click()
    assert "stopped" in tab.work.status.value
    assert ended.wait(5)  # the thread is told, not only left
    assert tab.page.value == "what was shown"


def test_while_a_job_measures_nothing_is_written_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p, tab = live(strict=False)
    monkeypatch.setattr(type(p.measuring), "running", property(lambda _: True))
    tab.go.click()
    assert "a job runs, and a generation beside it would slow" in str(p.errors[-1])


def test_generate_says_how_far_it_is_and_what_is_raised_there_ends_it() -> None:
    cfg, heard = lab.preset("tiny", device="cpu", batch_size=2), []
    made: list[Generated] = lab.generate(cfg, [[1, 2], [3]], max_new_tokens=9, on_progress=lambda *at: heard.append(at))
    assert len(made) == 2
    assert heard[-1] == (18, 18)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    with pytest.raises(KeyboardInterrupt):
        lab.generate(cfg, [[1, 2]], on_progress=_interrupt)


def _interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt
