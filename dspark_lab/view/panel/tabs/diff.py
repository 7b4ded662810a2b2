"""The tab Diff: two arms or two traces, why one is slower in words to paste, the causes as a waterfall, both on one clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as W

from dspark_lab.view import figures
from dspark_lab.view.browse.canvas import Browse
from dspark_lab.view.panel.guard import Guard
from dspark_lab.view.panel.picture import Picture, Stage
from dspark_lab.view.panel.tabs.choice import TraceChoice
from dspark_lab.view.panel.tabs.shown import Shown
from dspark_lab.view.panel.work import Work
from dspark_lab.view.theme import message

ASKED = "Choose two traces of the same thing, before and after: arms shown on the left, or files."


class DiffTab:
    """Before and after. ``diff`` is the last one made."""

    name = "Diff"

    def __init__(self, guard: Guard, changed: Callable[[], Any]) -> None:
        self._own = False
        self.work = Work(guard)
        self.before = TraceChoice("Before", guard, lambda: None if self._own else self._typed())
        self.after = TraceChoice("After", guard, lambda: None if self._own else self._typed())
        self.compare = W.Button(description="Compare", layout=W.Layout(width="90px"))
        self.compare.on_click(guard(lambda _: self.load()))
        self.text = W.Textarea(layout=W.Layout(width="100%", height="86px"), placeholder="the verdict, to copy")
        self.picture, self.stage = Picture(), Stage()
        self.fold = W.Accordion([self.stage.widget], titles=("both on one clock",), selected_index=None)
        self.fold.observe(guard(lambda _: self._both()), names="selected_index")
        self.diff: Any = None
        self._changed, self._made = changed, ""
        self._key: tuple[Any, ...] = ()
        head = W.HBox(
            [W.VBox([self.before.widget, self.after.widget]), self.compare], layout=W.Layout(align_items="center")
        )
        self.widget = W.VBox([head, self.work.widget, self.text, self.picture.widget, self.fold])

    @property
    def figure(self) -> Any:
        return self.picture.figure

    @property
    def script(self) -> str:
        return self._made or "import dspark_lab as lab\nfound = lab.diff('before.json.gz', 'after.json.gz')"

    def fill(self, width: int) -> None:
        self.picture.fill(width)

    def _typed(self) -> None:
        """Compares as soon as both are there."""
        if self.before.value and self.after.value:
            self.load()

    def load(self) -> None:
        """Compares what is chosen, large files in a thread; raises `LabError` where a side is no trace. What was shown stays then."""
        from dspark_lab.analysis.diff import diff

        key = (self.before.state, self.after.state)
        if key == self._key:
            self.work.leave(unless=("both", key))
            return
        before, after = self.before.opener(), self.after.opener()
        title = f"{self.after.title} against {self.before.title}"
        code = f"import dspark_lab as lab\nfound = lab.diff({self.before.code}, {self.after.code})\nprint(found.sentence)\nfigure = lab.plot.causes(found, title={title!r})"

        def compare() -> tuple[Any, Any]:
            found = diff(before(), after())
            return found, figures.causes(found, title=title)

        self.work.run(key, compare, lambda made: self._show(key, code, *made), num_bytes=self._num_bytes)

    def _show(self, key: tuple[Any, ...], code: str, found: Any, figure: Any) -> None:
        self.diff, self._key, self._made = found, key, code
        self.text.value = found.sentence
        self.picture.show(figure)
        self._both()
        self._changed()

    @property
    def _num_bytes(self) -> int:
        return self.before.num_bytes + self.after.num_bytes

    def _both(self) -> None:
        """The two timelines, made when they are asked for."""
        if self.fold.selected_index is None or self.diff is None or self.stage.key == self._key:
            return
        names = [f"before: {self.before.title}", f"after: {self.after.title}"]
        openers, key = (self.before.opener(), self.after.opener()), self._key

        def made() -> Browse:
            return Browse({name: opened() for name, opened in zip(names, openers, strict=True)})

        self.work.run(
            ("both", key), made, lambda browse: self.stage.show(key, lambda: browse), num_bytes=self._num_bytes
        )

    def draw(self, shown: Shown) -> None:
        runs = shown.captured
        mine = self.before.is_arm and self.after.is_arm
        self._own = True
        try:
            for choice in (self.before, self.after):
                choice.offer(runs)
            if mine and len(runs) > 1:
                self._pick(self.before.options)
        finally:
            self._own = False
        if mine and len(runs) > 1:
            self.load()
        elif mine or self.picture.figure is None:
            self.work.leave()
            self.text.value, self._key = "", ()
            self.picture.show(message(self.name, ASKED if len(runs) > 1 or not mine else f"{ASKED} {_few(shown)}"))

    def _pick(self, options: list[str]) -> None:
        """Keeps the arms chosen where they are still there; else the first, and the one that blocks or the last."""
        if self.before.value not in options:
            self.before.value = options[0]
        if self.after.value not in options or self.after.value == self.before.value:
            slow = next((o for o in options if o.startswith("blocking")), options[-1])
            self.after.value = slow if slow != self.before.value else next(o for o in options if o != self.before.value)


def _few(shown: Shown) -> str:
    return "One arm with a capture is shown; tick another." if shown.captured else shown.no_capture
