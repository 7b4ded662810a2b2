"""One guard around everything a widget calls: an exception is never swallowed, it turns red, is kept, and in strict mode raised."""

from __future__ import annotations

import functools
import html
import threading
import traceback
from collections.abc import Callable
from typing import Any

import ipywidgets as W

from dspark_lab.errors import LabError
from dspark_lab.view.panel.turn import TURN

RED = "#B42318"


class Guard:
    """Wraps observers. ``errors`` keeps what went wrong, ``widget`` says it in one red line with the details folded."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.errors: list[BaseException] = []
        self.widget = W.HTML(layout=W.Layout(display="none", margin="0"))
        self._inside = threading.local()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "yes", False):  # an inner call: the outermost one reports
                return fn(*args, **kwargs)
            with TURN:
                before = len(self.errors)
                value = outer(*args, **kwargs)
                if len(self.errors) == before:
                    self.clear()
                return value

        outer = self.aside(fn)
        return guarded

    def aside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Of what no person waits for: waits for no turn, and leaves the red line of another call where it is."""

        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._inside.yes = True
            try:
                return fn(*args, **kwargs)
            except Exception as e:
                self.show(e)
                if self.strict:
                    raise
            finally:
                self._inside.yes = False

        return guarded

    def show(self, error: BaseException, *, details: str | None = None) -> None:
        """Puts ``error`` on the red line and keeps it."""
        with TURN:
            self._show(error, details)

    def _show(self, error: BaseException, details: str | None) -> None:
        self.errors.append(error)
        mine = isinstance(error, LabError)
        line = (
            str(error)
            if mine
            else f"{type(error).__name__}: {error}. This is a bug of the panel; the details help to mend it."
        )
        folded = details if details is not None else "".join(traceback.format_exception(error))
        self.widget.value = (
            f'<div role="alert" style="color:{RED};line-height:1.35;padding:4px 8px;border-left:3px solid {RED};background:#FEF3F2">'
            f"<b>{html.escape(line.splitlines()[0] if line else 'failed')}</b>"
            f'<details style="color:#6B7280"><summary style="cursor:pointer">details</summary>'
            f'<pre style="white-space:pre-wrap;max-height:180px;overflow:auto;margin:4px 0">{html.escape(folded)}</pre></details></div>'
        )
        self.widget.layout.display = ""

    def clear(self) -> None:
        """The red line goes; ``errors`` stays."""
        self.widget.value = ""
        self.widget.layout.display = "none"
