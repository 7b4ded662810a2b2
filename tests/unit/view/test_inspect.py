"""A generation token by token: outcomes are those of the rounds, and the page holds the text."""

from __future__ import annotations

import re

import pytest

import dspark_lab as lab
from dspark_lab.engine.generate import Generated
from dspark_lab.engine.results import RoundDetail
from dspark_lab.errors import LabError

PROMPT = list(b"ab<")
MADE = Generated(
    tokens=[*PROMPT, *b"c", *b"def", *b"\nh"],
    acceptance_lengths=[3, 2],
    proposal_lengths=[3, 1],
    rounds=[
        RoundDetail(drafts=list(b"dexy"), confidence=[0.9, 0.5, 0.25, 0.125], verified=4, tokens=list(b"def")),
        RoundDetail(drafts=list(b"\npqr"), confidence=[1.0, 0.2, 0.1, 0.1], verified=1, tokens=list(b"\nh")),
    ],
)


def test_outcomes():
    table = lab.inspect(MADE, PROMPT).table
    assert table["outcome"].tolist() == [
        "prefill",
        *("accepted", "accepted", "rejected", "discarded", "bonus"),
        *("accepted", "unverified", "unverified", "unverified", "bonus"),
    ]
    assert table["round"].tolist() == [0] + [1] * 5 + [2] * 5
    assert table[table["outcome"] == "bonus"]["position"].tolist() == [3, 2]
    kept = table[table["outcome"].isin(("prefill", "accepted", "bonus"))]
    assert "".join(kept["text"]) == bytes(MADE.tokens[len(PROMPT) :]).decode()


def test_the_page(tmp_path):
    seen = lab.inspect(MADE, PROMPT, title="Mine", label="measured")
    page = seen.save(tmp_path / "page.html").read_text()
    assert "ab&lt;" in page
    assert "measured · 5 tokens in 2 rounds, accept length 2.50 · darker: more confident" in page
    assert 'title="round 1, position 3: drafted, verified and refused; confidence 0.25"' in page
    opacities = [float(x) for x in re.findall(r'class="accepted" style="background:rgba\(0,158,115,([\d.]+)\)', page)]
    assert opacities[1] < opacities[0] < opacities[2]
    assert "<script" not in page
    short = lab.inspect(MADE, PROMPT, drafts=False).html
    assert 'class="rejected"' not in short
    assert short.count("<span class=") == 6


def test_a_drafter_without_confidence():
    made = Generated(
        tokens=[1, 2, 3],
        acceptance_lengths=[1],
        proposal_lengths=[1],
        rounds=[RoundDetail(drafts=[9], confidence=None, verified=1, tokens=[3])],
    )
    seen = lab.inspect(made, [1], text=lambda tokens: f"<{tokens[0]}>")
    assert seen.table["confidence"].isna().all()
    assert "&lt;9&gt;" in seen.html
    assert "confident" not in seen.html


def test_what_cannot_be_shown_is_said():
    bare = Generated(tokens=[1, 2], acceptance_lengths=[1], proposal_lengths=[0])
    with pytest.raises(LabError, match="keep_rounds=True"):
        lab.inspect(bare, [1])
    with pytest.raises(LabError, match="does not begin with this prompt"):
        lab.inspect(MADE, [5])


@pytest.mark.parametrize("prompt", ["AB", [], None, [1.5], 3])
def test_a_prompt_that_is_none_is_named(prompt):
    with pytest.raises(LabError, match=r"prompt=.* is not a list of token ids"):
        lab.inspect(MADE, prompt)


def test_what_is_no_generation_is_named():
    with pytest.raises(LabError, match="generated=None is no generation"):
        lab.inspect(None, [65])
    with pytest.raises(LabError, match="text=3 cannot be called"):
        lab.inspect(MADE, PROMPT, text=3)


def test_a_real_generation():
    prompt = lab.held_out("code")[2]
    cfg = lab.shipped(device="cpu", batch_size=1)
    made = lab.generate(cfg, [prompt], max_new_tokens=20, keep_rounds=True)[0]
    table = lab.inspect(made, prompt).table
    kept = table[table["outcome"].isin(("prefill", "accepted", "bonus"))]
    assert kept["token"].tolist()[:20] == made.tokens[len(prompt) :]
    assert table[table["outcome"] == "accepted"]["confidence"].between(0, 1).all()
