"""Places for what a tab shows. `Picture`: a plotly widget updated in place, or plain HTML where anywidget is missing. `Stage`: a timeline to zoom in."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import ipywidgets as W
import plotly.graph_objects as go

FIRST_WORDS = ("_js2py_traceDeltas", "_js2py_layoutDelta")
"""What plotly's widget tells the kernel after it has drawn."""


class Picture:
    """``show(figure)`` puts a figure there; ``figure`` is the last one shown, which stays until the next."""

    def __init__(self, *, min_height: str = "240px") -> None:
        self.figure: go.Figure | None = None
        self._live: Any = None
        self._drawn = False
        """Whether the browser has drawn the widget: its script loads for a while, and what is sent before that is lost."""
        self._width = 0
        self.widget = W.Box(layout=W.Layout(width="100%", min_height=min_height, overflow="hidden", margin="0"))

    def show(self, figure: go.Figure) -> None:
        if figure is self.figure:
            return
        if isinstance(self._live, W.HTML):
            self._live.value = _plain(figure)
        elif self._drawn:
            _update(self._live, figure, self._width)
        else:
            before, self._live = self._live, _widget(figure, self._width)
            self._hear(self._live)
            self.widget.children = (self._live,)
            if before is not None:
                before.close()
        self.figure = figure
        self.fill(self._width)

    def grow(self, figure: go.Figure) -> None:
        """`show`, for a figure whose traces are those shown with more points: they are moved in place, and nothing flickers."""
        live, traces = self._live, list[Any](figure.data)
        if not self._drawn or [t.name for t in live.data] != [t.name for t in traces]:
            self.show(figure)
            return
        with live.batch_update():
            for there, now in zip(live.data, traces, strict=True):
                there.x, there.y = now.x, now.y
            live.layout.title = figure.layout["title"]
        self.figure = figure

    @property
    def drawn(self) -> bool:
        """Whether the browser has drawn it; until then `show` makes the widget anew, which a figure that grows must not ask for at each look."""
        return self._drawn

    def _hear(self, live: Any) -> None:
        """Learns of the browser's first word about ``live``, which it says once it has drawn it."""
        if isinstance(live, W.HTML):
            return

        def heard(_: Any) -> None:
            if live is self._live and not self._drawn:
                self._drawn = True
                self.fill(self._width)

        live.observe(heard, names=list(FIRST_WORDS))

    def fill(self, width: int) -> None:
        """Makes the figure ``width`` pixels wide; 0: as wide as plotly finds."""
        self._width = width
        if width and self._drawn and self._live.layout.width != width:
            self._live.layout.width = width


class Stage:
    """A place for one timeline to zoom in; ``figure`` is the `Browse` shown, which stays until the next is made."""

    def __init__(self) -> None:
        self.figure: Any = None
        self.key: Any = None
        """What `show` was given last."""
        self.widget = W.Box(layout=W.Layout(width="100%", overflow="hidden", margin="0"))

    def show(self, key: Any, make: Callable[[], Any]) -> None:
        """Shows what ``make`` gives, unless it is that of ``key`` already."""
        if key == self.key:
            return
        self.figure = make()
        self.key = key
        self.figure.widget.layout.width = "100%"
        self.widget.children = (self.figure.widget,)


def _widget(figure: go.Figure, width: int) -> Any:
    """A `go.FigureWidget`, whole from the start; plain HTML with the script inside (no download) where anywidget cannot be imported."""
    layout = go.Layout(figure.layout, width=width or None, autosize=True)
    try:
        with _without_grammars():
            live: Any = _whole()(data=figure.data, layout=layout)
    except ImportError:
        return W.HTML(_plain(figure), layout=W.Layout(width="100%"))
    live._config = {**(live._config or {}), "displaylogo": False, "responsive": True}
    live._is_whole = True
    live.open()
    return live


@cache
def _whole() -> Any:
    """`go.FigureWidget` that the browser first hears of with all its data.

    plotly's own opens empty and sends data and layout behind it; a browser that draws in between shows axes of nothing for good.
    """

    class Whole(go.FigureWidget):
        _is_whole = False

        def open(self) -> None:
            if self._is_whole:
                super().open()

    return Whole


@contextmanager
def _without_grammars() -> Iterator[None]:
    """Lets plotly's first import skip rfc3987_syntax, which compiles 39 grammars in over 2 s to check IRIs in notebook files.

    plotly imports nbformat, that jsonschema, and that takes the module only where it is there. Later imports find it again.
    """
    name = "rfc3987_syntax"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[name]


def _update(live: Any, figure: go.Figure, width: int) -> None:
    """The widget takes the figure's data and layout; nothing is made anew in the browser."""
    with live.batch_update():
        live.data = []
        live.layout.shapes, live.layout.annotations = (), ()  # a relayout leaves arrays that it does not name
    live.add_traces(list(figure.data))
    live.layout = go.Layout(figure.layout, width=width or None, autosize=True)


def _plain(figure: go.Figure) -> str:
    """The figure as an inner page: scripts of a widget's HTML do not run, those of an inner page do."""
    layout: Any = figure.layout
    page = html.escape(figure.to_html(include_plotlyjs=True, config={"displaylogo": False}), quote=True)
    return f'<iframe srcdoc="{page}" style="width:100%;height:{int(layout.height or 360) + 20}px;border:0"></iframe>'
