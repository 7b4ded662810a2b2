"""The token-by-token view in a browser: nothing from outside, colours by outcome, what a pointer is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import dspark_lab as lab
from tests.browser.test_quickstart import Panel, run_all, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_a_generation_token_by_token(page: Page, shots: Path, asked_outside: list[str]) -> None:
    prompt = lab.held_out("prose")[5]
    cfg = lab.shipped(device="cpu", batch_size=1, verify="threshold", confidence_threshold=0.5)
    (made,) = lab.generate(cfg, [prompt], max_new_tokens=120, keep_rounds=True)
    seen = lab.inspect(made, prompt, label="measured")
    page.set_content(seen.html)
    for outcome, count in seen.table["outcome"].value_counts().items():
        expect(page.locator(f"span.{outcome}")).to_have_count(int(count))
    written = "".join(page.locator("span.prefill, span.accepted, span.bonus").all_text_contents()).replace("↵", "")
    assert written.startswith(lab.text_of(made.tokens[len(prompt) :]))
    first = page.locator("span.accepted").first
    assert "0, 158, 115" in first.evaluate("e => getComputedStyle(e).backgroundColor")
    assert "position 1: drafted and accepted; confidence" in str(first.get_attribute("title"))
    assert page.locator("span.rejected").first.evaluate("e => getComputedStyle(e).textDecorationLine") == "line-through"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing runs out of the page
    page.screenshot(path=shots / "inspect.png")
    assert not asked_outside


def test_the_tab_tokens_continues_a_text(jupyter: str, page: Page, shots: Path, asked_outside: list[str]) -> None:
    run_all(page, f"{jupyter}/lab/tree/01_quickstart.ipynb?reset")
    panel = Panel(page)
    expect(panel.sentence).to_contain_text("blocking: step", timeout=60_000)
    show(panel)
    panel.tab("Tokens")
    tokens = panel.box.locator(".dspark-tokens:visible")
    panel.button("Continue ▸").click()
    expect(panel.red).to_contain_text("recordings keep steps, not tokens")
    panel.shot(shots / "9_tokens_refused.png")
    panel.button("This machine").click()
    panel.select("Preset").select_option("shipped")
    expect(panel.select("Drafter")).to_be_enabled()
    panel.select("Text").select_option("prose")
    panel.select("Verify").select_option("threshold")
    threshold = panel.number("Threshold")
    expect(threshold).to_be_enabled()
    threshold.fill("0.4")
    threshold.press("Tab")
    number, new = tokens.locator("input[type=number]").nth(0), tokens.locator("input[type=number]").nth(1)
    number.fill("5")
    new.fill("120")
    panel.button("Continue ▸").click()
    expect(panel.box.locator(".dspark-inspect:visible")).to_be_visible(timeout=120_000)
    expect(panel.box.locator(".dspark-inspect")).to_contain_text(
        "dspark-rnn continues held-out prose 5: γ 7, verify threshold 0.4"
    )
    expect(panel.box.locator(".dspark-inspect")).to_contain_text("measured here")
    expect(panel.red).to_have_count(0)
    show(panel)
    panel.shot(shots / "9_tokens.png")
    refused = panel.box.locator("span.rejected").count() + panel.box.locator("span.unverified").count()
    assert refused > 0
    tokens.locator("input[type=checkbox]").uncheck()
    expect(panel.box.locator("span.unverified")).to_have_count(0)
    tokens.locator("select").select_option("typed text")
    typed = panel.box.locator("textarea:visible").first
    typed.fill("In the beginning ")
    new.fill("2000")
    panel.button("Continue ▸").click()
    expect(panel.red).to_contain_text("new tokens 2000 cannot be: legal are 1 to 1007")
    expect(typed).to_have_value("In the beginning ")
    new.fill("1000")
    panel.button("Continue ▸").click()
    expect(panel.box.get_by_text("of 1000 tokens")).to_be_visible(timeout=60_000)
    panel.shot(shots / "9_tokens_progress.png")
    panel.box.locator(".dspark-work:visible").get_by_text("Stop ■").click()
    expect(panel.box.get_by_text("stopped; what was shown stays").locator("visible=true")).to_be_visible(timeout=20_000)
    expect(panel.box.locator(".dspark-inspect")).to_contain_text("held-out prose 5")
    expect(typed).to_have_value("In the beginning ")
    expect(threshold).to_have_value("0.4")
    assert asked_outside == []
