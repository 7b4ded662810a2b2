"""Notebook 06 in JupyterLab: its timeline is zoomed, searched and clicked; saved, it keeps a picture and stays small. And the panel's tabs on traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.test_quickstart import Panel, run_all

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

NOTEBOOK = "06_open_your_trace.ipynb"
CAPTURES = Path(__file__).parents[1] / "data" / "traces"


def scrolled_to(page: Page, wanted: Locator) -> None:
    """Scrolls the notebook until ``wanted`` is there: JupyterLab puts only the cells near the view on the page."""
    scroller = page.locator(".jp-WindowedPanel-outer")
    for top in range(0, 12_000, 300):
        scroller.evaluate("(e, top) => { e.scrollTop = top; }", top)
        page.wait_for_timeout(150)
        if wanted.count():
            wanted.first.scroll_into_view_if_needed()
            return
    raise AssertionError(f"{wanted} is nowhere in the notebook")


def idle_again(page: Page) -> None:
    """Until the kernel has run all cells and rested for a moment."""
    rested = 0
    for _ in range(600):
        rested = rested + 1 if page.get_by_text("Python 3 (ipykernel) | Idle").count() else 0
        if rested == 10:
            return
        page.wait_for_timeout(200)
    raise AssertionError("the kernel is busy without an end")


def shows(timeline: Locator, name: str) -> int:
    return int(timeline.get_attribute(f"data-{name}") or -1)


def settled(page: Page, timeline: Locator) -> None:
    """Until the browser has what it asked for last."""
    page.wait_for_timeout(150)
    expect(timeline).not_to_have_attribute("data-waiting", "1", timeout=60_000)
    expect(timeline).to_have_attribute("data-round-trip-ms", re.compile(r"\d"), timeout=60_000)


def test_timeline_of_notebook_06(jupyter: str, page: Page, asked_outside: list[str], shots: Path, tmp_path: Path):
    run_all(page, f"{jupyter}/lab/tree/{NOTEBOOK}?reset")
    timeline = page.locator(".dspark-timeline", has_text="before against after")
    idle_again(page)
    scrolled_to(page, timeline)
    settled(page, timeline)
    page.screenshot(path=shots / "6_two_traces.png")
    expect(page.locator(".dspark-still:visible")).to_have_count(0)  # the still picture is for pages without a kernel

    timeline.get_by_role("button", name="all").click()
    settled(page, timeline)
    assert shows(timeline, "merged") > 3000
    assert shows(timeline, "bytes") < 1_000_000
    far = shows(timeline, "own")
    page.screenshot(path=shots / "6_all.png")
    canvas = timeline.locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 500, box["y"] + 100)
    page.keyboard.down("Control")
    for _ in range(6):
        page.mouse.wheel(0, -300)
        page.wait_for_timeout(60)
    page.keyboard.up("Control")
    settled(page, timeline)
    assert shows(timeline, "hi") - shows(timeline, "lo") < 1_000_000  # ns
    assert shows(timeline, "merged") < 30
    assert shows(timeline, "own") > min(far, 20)
    assert shows(timeline, "bytes") < 1_000_000

    page.mouse.click(box["x"] + 600, box["y"] + box["height"] - 14)
    expect(timeline.locator(".info")).to_contain_text("launched by", timeout=60_000)
    expect(timeline.locator(".info")).to_contain_text("cudaGraphLaunch")
    page.screenshot(path=shots / "6_zoomed_and_clicked.png")
    timeline.get_by_label("search names").fill("cudaStreamSynchronize")
    expect(timeline).to_contain_text("8 found", timeout=60_000)
    timeline.get_by_label("search names").press("Enter")
    expect(timeline).to_contain_text(re.compile(r"\d of 8 found"))
    expect(timeline.locator(".info")).to_contain_text("host waits sync")
    expect(timeline.locator(".error")).to_have_text("")

    page.locator(".lm-MenuBar-itemLabel", has_text="File").click()
    page.locator(".lm-Menu-itemLabel").get_by_text("Save Notebook", exact=True).click()
    saved = tmp_path / "root" / NOTEBOOK
    for _ in range(100):
        text = saved.read_text()
        if "dspark-still" in text:
            break
        page.wait_for_timeout(100)
    assert text.count("dspark-still") == 2
    assert len(text) < 600_000
    assert not json.loads(text)["metadata"].get("widgets")
    assert asked_outside == []


def test_panel_on_traces(jupyter: str, page: Page, asked_outside: list[str], shots: Path):
    run_all(page, f"{jupyter}/lab/tree/01_quickstart.ipynb?reset")
    panel = Panel(page)
    expect(panel.sentence).to_contain_text("blocking: step", timeout=60_000)
    panel.box.evaluate("panel => panel.scrollIntoView()")

    panel.tab("Diff")
    expect(panel.box.locator("textarea:visible").first).to_have_value(
        re.compile("µs of .* a step in this profiled capture"), timeout=60_000
    )
    panel.drawn()
    panel.shot(shots / "7_diff.png")

    panel.tab("What-if")
    expect(panel.box).to_contain_text("replay of the unedited trace", timeout=60_000)
    panel.drawn()
    panel.shot(shots / "7_whatif.png")

    panel.tab("Trace file")
    path = panel.box.locator(".dspark-trace-file input[type=text]").first
    path.fill(str(CAPTURES / "h200" / "trace_blocking.json.gz"))
    panel.button("Open").click()
    timeline = panel.box.locator(".dspark-timeline:visible")
    expect(timeline).to_contain_text("trace_blocking", timeout=60_000)
    settled(page, timeline)
    idle_again(page)  # the notebook's last cell wants no red line
    path.fill("/nowhere/absent.json")
    path.press("Enter")
    expect(panel.red).to_contain_text("no trace at /nowhere/absent.json", timeout=60_000)
    expect(panel.red).to_contain_text("Give a Kineto JSON file")
    expect(timeline).to_contain_text("trace_blocking")  # the last good picture stays
    panel.shot(shots / "7_bad_path.png")
    path.fill(str(CAPTURES / "hostile" / "two"))
    panel.button("Open").click()
    expect(panel.red).to_have_count(0, timeout=60_000)
    expect(panel.box).to_contain_text("rank 1")
    assert asked_outside == []
