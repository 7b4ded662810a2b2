"""The diff as a page: it stands alone, says what the diff says, marks what is withheld."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.analysis.diff import diff
from dspark_lab.errors import LabError
from dspark_lab.export.pictures import COLOURS, causes_svg
from dspark_lab.export.report import to_report

VOID = {"meta"}


class Page(HTMLParser):
    """Text and tags of a page; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not {"src", "href", "onclick", "onload"} & {k for k, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_it_says_what_the_diff_says_and_needs_nothing(h200: Path, tmp_path: Path) -> None:
    one, two = h200 / "trace_none.json.gz", h200 / "trace_blocking.json.gz"
    made = to_report(one, two, tmp_path / "report.html")
    text = made.read_text()
    page, found = Page(text), diff(one, two)
    assert unescape(found.sentence) in page.text
    assert all(
        x in page.text
        for x in ("3,458.6", "3,713.6", "+255.0", "profiled", "cudaStreamSynchronize", "sound", "residual")
    )
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    assert "@import" not in text
    assert "url(" not in text
    assert len(text) < 200_000


def test_ranks_and_lists_of_captures(h200: Path, tmp_path: Path) -> None:
    captures = [h200 / f"trace_{n}.json.gz" for n in ("none", "non_blocking")]
    page = Page(to_report(captures, captures, tmp_path / "r.html", names=("a<b>", "c")).read_text())
    assert "tie" in page.text
    assert "over captures" in page.text
    assert "a<b>" in page.text


def test_names_cannot_break_out(made: Any, write: Callable[..., Path], tmp_path: Path) -> None:
    paths = []
    for k, us in enumerate((20, 60)):
        trace = made()
        for step in range(4):
            trace.mark(f"ProfilerStep#{step}", 100.0 * step, 90)
            trace.device(
                '</td><script>alert("x")</script>&',
                100.0 * step + 10,
                us,
                trace.call("LaunchKernel", 100.0 * step + 1, 2),
            )
        paths.append(write(trace.content(), f"t{k}.json"))
    page = Page(to_report(*paths, tmp_path / "r.html").read_text())
    assert "script" not in page.tags
    assert '</td><script>alert("x")</script>&' in page.text


def test_withheld_causes_are_not_drawn(made: Any, write: Callable[..., Path], h200: Path, tmp_path: Path) -> None:
    trace = made()
    for step in range(6):
        trace.mark(f"ProfilerStep#{step}", 1000.0 * step, 900)
        launch = trace.call("GraphLaunch", 1000.0 * step + 10, 100)
        for k in range(2 if step == 4 else 3):
            trace.device(f"k{k}", 1000.0 * step + 200 + 50 * k, 40, launch)
    page = Page(to_report(write(trace.content()), h200 / "trace_none.json.gz", tmp_path / "r.html").read_text())
    assert "withheld" in page.text
    assert "fewer events" in page.text
    assert "undermined" in page.text
    assert page.tags.count("svg") == 1, "the steps; no causes, no strips"


def test_what_cannot_be(h200: Path, hostile: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no steps"):
        to_report(h200 / "trace_none.json.gz", hostile / "metaonly", tmp_path / "r.html")
    with pytest.raises(LabError, match="no folder /proc/nothing"):
        to_report(h200 / "trace_none.json.gz", h200 / "trace_none.json.gz", "/proc/nothing/r.html")
    with pytest.raises(LabError, match="cannot write"):
        to_report(h200 / "trace_none.json.gz", h200 / "trace_none.json.gz", "/proc/r.html")
    assert list(tmp_path.iterdir()) == []


def test_the_waterfall_ends_at_the_delta() -> None:
    svg = causes_svg([("a", 30.0, "wait"), ("b", -10.0, "compute")], 20.0)
    bars = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', svg)]
    (a, a_w), (b, b_w), (delta, delta_w) = bars
    assert a == delta
    assert b + b_w == pytest.approx(a + a_w, abs=0.2)
    assert b == pytest.approx(delta + delta_w, abs=0.2)


def test_colours_are_those_of_every_figure() -> None:
    theme = pytest.importorskip("dspark_lab.view.theme")
    shared = set(COLOURS) & set(theme.COLOURS)
    assert {"compute", "communication", "copy", "wait", "host", "idle"} == shared
    assert {k: COLOURS[k] for k in shared} == {k: theme.COLOURS[k] for k in shared}
