"""The token-by-token view in a browser: nothing from outside, colours by outcome, what a pointer is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import dspark_lab as lab

pytestmark = pytest.mark.browser


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
