"""The trained drafters as a person meets them: the panel's toggles of drafting, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_quickstart import Panel, run_all, runs_on_disk, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_panel_drafts_with_a_trained_drafter(
    jupyter: str, page: Page, asked_outside: list[str], shots: Path, tmp_path: Path
) -> None:
    run_all(page, f"{jupyter}/lab/tree/01_quickstart.ipynb?reset")
    panel = Panel(page)
    expect(panel.sentence).to_contain_text("blocking: step", timeout=60_000)
    show(panel)
    panel.button("This machine").click()
    panel.select("Preset").select_option("tiny")
    expect(panel.select("Drafter")).to_be_disabled()
    panel.select("Preset").select_option("shipped")
    expect(panel.select("Drafter")).to_be_enabled()
    panel.select("Drafter").select_option("dspark-gated")
    panel.select("Text").select_option("code")
    panel.select("Verify").select_option("threshold")
    panel.box.locator("input[type=number]:visible").last.fill("0.4")
    panel.box.locator("input[type=number]:visible").last.press("Tab")
    panel.page.wait_for_timeout(500)
    for arm in ("blocking", "non_blocking"):
        panel.arm(arm).uncheck()
    for label, value in (("Steps", "16"), ("Repeats", "1"), ("Processes", "1"), ("Profiled steps", "0")):
        panel.select(label).select_option(value)
    show(panel)
    panel.shot(shots / "8_drafting_toggles.png")
    panel.button("Run ▸").click()
    panel.ended("complete", within_s=150)
    panel.tab("Acceptance")
    panel.drawn()
    panel.shot(shots / "8_drafting_acceptance.png")
    (first, *_) = runs_on_disk(tmp_path, preset="shipped")
    config = first["config"]
    assert config["drafter_path"] == "shipped:dspark-gated"
    assert (config["text"], config["verify"], config["confidence_threshold"]) == ("code", "threshold", 0.4)
    accepted = first["acceptance"]["accepted"]
    assert sum(k * n for k, n in enumerate(accepted)) > 0.5 * sum(accepted)  # it really drafts
    assert asked_outside == []
