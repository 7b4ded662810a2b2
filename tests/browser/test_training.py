"""A training as a person watches it: curves that grow, Stop, Go on, and a red line for what fails."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_quickstart import DRAWN, run_all

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELL = """
import numpy as np

import dspark_lab as lab
from dspark_lab.config.shipped import data_dir

texts = np.load(data_dir() / "models" / "samples.npz")["train"][:16, :64].tolist()


def train(**more):
    return lab.train_drafter(
        "shipped:target", texts, out="runs/here", mask_token_id=255, seq_len=64, device="cpu", num_steps=4000, batch_size=2, num_anchors=8,
        num_layers=1, log_every=2, peak_lr={rate}, **more,
    )


view = lab.live_training(train)
view
"""


def open_with(page: Page, jupyter: str, root: Path, name: str, rate: str) -> None:
    cells = [nbformat.v4.new_code_cell(CELL.replace("{rate}", rate).strip())]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), root / f"{name}.ipynb")
    run_all(page, f"{jupyter}/lab/tree/{name}.ipynb?reset")


def test_stop_and_go_on(jupyter: str, page: Page, asked_outside: list[str], shots: Path, tmp_path: Path) -> None:
    open_with(page, jupyter, tmp_path / "root", "training", "4e-3")
    box = page.locator(".dspark-training")
    stop, go = (box.locator("button", has_text=name) for name in ("Stop ■", "Go on ▸"))
    expect(box.get_by_text("of 4000, loss")).to_be_visible(timeout=60_000)
    expect(stop).to_be_enabled()
    expect(go).to_be_disabled()
    plot = box.locator(".js-plotly-plot")
    expect(plot.locator(".scatterlayer .trace")).to_have_count(
        5, timeout=120_000
    )  # plotly's script takes its time beside a training
    points = plot.evaluate(DRAWN)
    for _ in range(100):  # it grows, and is never empty meanwhile
        page.wait_for_timeout(300)
        now = plot.evaluate(DRAWN)
        assert now >= points > 5
        if now > points + 2:
            break
    else:
        raise AssertionError("the curves do not grow")
    page.screenshot(path=shots / "10_training.png")
    stop.click()
    expect(box.get_by_text("stopped,")).to_be_visible(timeout=30_000)
    expect(stop).to_be_disabled()
    assert (tmp_path / "root" / "runs" / "here" / "training.pt").is_file()
    page.wait_for_timeout(1000)
    page.screenshot(path=shots / "10_training_stopped.png")
    go.click()
    expect(box.get_by_text("of 4000, loss")).to_be_visible(timeout=60_000)
    expect(box.get_by_text("stopped,")).to_have_count(0)
    stop.click()
    expect(box.get_by_text("stopped,")).to_be_visible(timeout=30_000)
    expect(box.locator("[role=alert]")).to_have_count(0)
    assert asked_outside == []


def test_what_fails_is_red(jupyter: str, page: Page, tmp_path: Path, shots: Path) -> None:
    open_with(page, jupyter, tmp_path / "root", "fails", "float('inf')")
    box = page.locator(".dspark-training")
    expect(box.locator("[role=alert]")).to_contain_text("peak_lr=inf is not a finite number", timeout=60_000)
    expect(box.get_by_text("failed,")).to_be_visible()
    page.screenshot(path=shots / "10_training_failed.png")
