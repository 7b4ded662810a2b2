"""One toggle: a label, a native control, a small line that says why it or some of its values cannot be chosen now."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as W
from traitlets import TraitError

from dspark_lab.errors import LabError, unknown
from dspark_lab.view.panel.reasons import Choice, merged, said

CELL = "104px"
"""Width of one toggle; two stand beside each other."""
SOFT = "color:var(--jp-ui-font-color2,#6B7280);font-size:11px;line-height:1.25"


class Toggle:
    """``value`` reads and sets it; ``reason`` says why not; ``widget`` is the label over the control, ``line`` the reason's place."""

    def __init__(self, name: str, label: str, control: Any, *, tip: str = "") -> None:
        self.name, self.label, self.tip, self.control = name, label, tip, control
        self.reason = ""
        self._seen: Callable[[str], Any] | None = None
        self._own = False
        control.tooltip = tip or None
        control.layout.width, control.layout.margin = CELL, "0"
        self.line = W.HTML(layout=W.Layout(display="none", margin="0", width="100%"))
        self.widget = self._laid_out()

    def _laid_out(self) -> Any:
        head = W.HTML(f'<span style="font-size:12px">{html.escape(self.label)}</span>', layout=W.Layout(margin="0"))
        head.tooltip = self.tip or None
        self.control.layout.height = "25px"
        return W.VBox([head, self.control], layout=W.Layout(margin="0 8px 0 0", width=CELL, overflow="hidden"))

    @property
    def value(self) -> Any:
        return self.control.value

    @value.setter
    def value(self, value: Any) -> None:
        try:
            self.control.value = value
        except TraitError as e:
            raise LabError(f"{self.name}={value!r} cannot be chosen: {e}") from None

    def observe(self, seen: Callable[[str], Any]) -> None:
        """Calls ``seen(name)`` at each change of the value."""
        self._seen = seen
        self.control.observe(lambda _: None if self._own else seen(self.name), names="value")

    def say(self, reason: str, *, disabled: bool = False, aloud: bool = True) -> None:
        """Puts ``reason`` on the small line and into the tooltip; ``disabled`` greys the control."""
        self.reason = reason
        self.control.disabled = disabled
        self.control.tooltip = reason or self.tip or None
        shown = bool(reason) and aloud
        self.line.value = f'<div style="{SOFT}">{html.escape(reason)}</div>' if shown else ""
        self.line.layout.display = "" if shown else "none"

    def fix(self, value: Any) -> None:
        """Shows ``value`` as it is in a recording, not to be turned."""
        if value is not None:
            self.control.value = value


class Pick(Toggle):
    """A toggle with a list of values, drawn as a native select. Values that cannot be chosen are left out and said."""

    def __init__(self, name: str, label: str, values: Iterable[Any], value: Any, *, tip: str = "") -> None:
        values = list(values)
        super().__init__(name, label, W.Dropdown(options=_options(values), value=value), tip=tip)

    @property
    def value(self) -> Any:
        return self.control.value

    @value.setter
    def value(self, value: Any) -> None:
        have = [v for _, v in self.control.options]
        if value in have:
            self.control.value = value
            return
        if value != value:  # NaN, which no list finds again
            raise LabError(f"{self.name}={value!r} is no value to choose; listed: {', '.join(map(str, have))}.")
        self._own = True  # given in code: whether it is legal, the config says
        try:
            self.control.options = (*self.control.options, *_options([value]))
            self.control.value = value
        finally:
            self._own = False
        if self._seen:
            self._seen(self.name)

    def fix(self, value: Any) -> None:
        options = (("–", "–"),) if value is None else _options([value])
        if tuple(self.control.options) != options:
            self.control.options = options

    def offer(self, choices: Sequence[Choice], value: Any, *, word: str = "", why: str = "") -> None:
        """Lists the legal ones of ``choices``, sets ``value``, says the reasons of the rest; ``why`` disables the whole.

        A ``value`` that is not legal is listed too: the control shows what the config has."""
        legal = [c.value for c in choices if not c.reason]
        if value not in legal and value == value:
            legal.append(value)
        options = _options(legal)
        if self.control.options != options:
            self.control.options = options
        shown = value if value in legal else None  # NaN is in no list
        if self.control.value != shown:
            self.control.value = shown
        self.say(
            why or (merged(list(choices), word) if word else said(choices)),
            disabled=bool(why) or len(legal) < 2,
            aloud=not why,
        )


class Switch(Toggle):
    """A toggle that is on or off, its label beside the box."""

    def __init__(self, name: str, label: str, value: bool, *, tip: str = "") -> None:
        super().__init__(name, label, W.Checkbox(value=value, description=label, indent=False), tip=tip)

    def _laid_out(self) -> Any:
        self.control.layout = W.Layout(height="22px", margin="0 8px 0 0", width="auto", min_width=CELL)
        return self.control

    def offer(self, choices: Sequence[Choice], value: bool, *, why: str = "") -> None:
        """Sets ``value`` where it is legal, else what is; ``why`` disables."""
        legal = [c.value for c in choices if not c.reason]
        self.control.value = value if value in legal else legal[0]
        self.say(why or said(choices), disabled=bool(why) or len(legal) < 2, aloud=bool(why))


class Arms:
    """Checkboxes of the strategies, and ``also`` controls beside them. ``value`` is the list of those checked and legal, in their order; a wish outlives a disabling."""

    name = "alloc"

    def __init__(
        self, names: Iterable[str], checked: Iterable[str], *, tips: dict[str, str], also: Sequence[Any] = ()
    ) -> None:
        self._wished = set(checked)
        self.tips, self._also = tips, tuple(also)
        self.reasons: dict[str, str] = {}
        self.boxes: dict[str, Any] = {}
        self.refused: LabError | None = None
        """Why what was set last was not taken; nothing changed then."""
        self._seen: Callable[[str], Any] | None = None
        self._own = False
        self._list = W.Box(layout=W.Layout(margin="0", overflow="hidden", flex_flow="row wrap"))
        self._line = W.HTML(layout=W.Layout(margin="0", width="100%"))
        head = W.HTML('<span style="font-size:12px;font-weight:600">Allocation</span>', layout=W.Layout(margin="0"))
        self.widget = W.VBox([head, self._list, self._line], layout=W.Layout(margin="0 0 4px 0", overflow="hidden"))
        for name in names:
            self._box(name)

    def _box(self, name: str) -> Any:
        if name not in self.boxes:
            box = W.Checkbox(value=name in self._wished, description=name, indent=False,
                             layout=W.Layout(width="auto", min_width=CELL, flex="0 1 auto", margin="0 8px 0 0", height="22px"))  # fmt: skip
            box.tooltip = self.tips.get(name)
            box.observe(lambda change, n=name: self._changed(n, change["new"]), names="value")
            self.boxes[name] = box
            self._list.children = (*self.boxes.values(), *self._also)
        return self.boxes[name]

    @property
    def value(self) -> list[str]:
        return [n for n, box in self.boxes.items() if box.value and not box.disabled]

    @value.setter
    def value(self, names: Iterable[str]) -> None:
        names = [names] if isinstance(names, str) else list(names)
        self.refused = self._why_not(names)
        if self.refused is None:
            self._wished = set(names)
        self._set({n: n in self._wished and not box.disabled for n, box in self.boxes.items()})
        if self._seen:
            self._seen(self.name)

    def _why_not(self, names: Sequence[str]) -> LabError | None:
        """Why ``names`` cannot be ticked now."""
        for n in names:
            if n not in self.boxes:
                return unknown("alloc", n, self.boxes)
            if self.boxes[n].disabled:
                legal = ", ".join(m for m, box in self.boxes.items() if not box.disabled)
                why = self.reasons.get(n, "it is not offered")
                return LabError(f"alloc={n!r} cannot be chosen now: {why}; legal: {legal or 'none of them'}.")
        return None

    @property
    def reason(self) -> str:
        """What the small line says."""
        groups: dict[str, list[str]] = {}
        for n, r in self.reasons.items():
            groups.setdefault(r, []).append(n)
        return "; ".join(r if names == r.split()[:1] else f"{', '.join(names)}: {r}" for r, names in groups.items())

    def observe(self, seen: Callable[[str], Any]) -> None:
        self._seen = seen

    def offer(self, choices: Iterable[Choice]) -> None:
        """Disables what has a reason and says it; what becomes legal again is checked again if it was."""
        choices = list(choices)
        self.reasons = {c.value: c.reason for c in choices if c.reason}
        legal = {c.value for c in choices if not c.reason}
        for c in choices:
            box = self._box(c.value)
            box.disabled = bool(c.reason)
            box.layout.display = ""
            box.tooltip = c.reason or self.tips.get(c.value)
        for n in self.boxes.keys() - {c.value for c in choices}:  # of recordings only, such as pinned:always
            self.boxes[n].disabled, self.boxes[n].layout.display = True, "none"
        checked = {n: n in self._wished and n in legal for n in self.boxes}
        if self._wished and not any(checked.values()):
            checked |= dict.fromkeys(legal, True)
        self._set(checked)
        self._line.value = f'<div style="{SOFT}">{html.escape(self.reason)}</div>' if self.reasons else ""

    def _changed(self, name: str, on: bool) -> None:
        if self._own:
            return
        self.refused = None
        (self._wished.add if on else self._wished.discard)(name)
        if self._seen:
            self._seen(self.name)

    def _set(self, checked: dict[str, bool]) -> None:
        self._own = True
        try:
            for n, on in checked.items():
                self.boxes[n].value = on
        finally:
            self._own = False


def _options(values: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((f"{v:g}" if isinstance(v, float) else str(v), v) for v in values)
