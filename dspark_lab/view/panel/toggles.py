"""One toggle: a label, a native control, a small line that says why it or some of its values cannot be chosen now."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as W
from traitlets import TraitError

from dspark_lab.errors import LabError
from dspark_lab.view.panel.reasons import Choice, merged, said
from dspark_lab.view.panel.select import Select
from dspark_lab.view.panel.turn import TURN

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
            with TURN:
                self.control.value = value
        except TraitError as e:
            raise LabError(f"{self.name}={value!r} cannot be chosen: {e}") from None

    @property
    def offered(self) -> list[Any]:
        """The values that can be chosen, where the toggle lists any."""
        return []

    def observe(self, seen: Callable[[str], Any]) -> None:
        """Calls ``seen(name)`` at each change of the value."""
        self._seen = seen
        self.control.observe(lambda _: None if self._own else seen(self.name), names="value")

    def say(self, reason: str, *, disabled: bool = False, aloud: bool = True) -> None:
        """Puts ``reason`` on the small line and into the tooltip; ``disabled`` greys the control."""
        self.reason = reason
        with (
            self.control.hold_sync()
        ):  # one message: a second one puts back the last value where a person types already
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
    """A toggle with a list of values, drawn as a native select. Values that cannot be chosen are not offered, and said."""

    def __init__(self, name: str, label: str, values: Iterable[Any], value: Any, *, tip: str = "") -> None:
        super().__init__(name, label, Select(values, value, say=_said), tip=tip)

    @property
    def offered(self) -> list[Any]:
        return list(self.control.offered)

    @property
    def value(self) -> Any:
        return self.control.value

    @value.setter
    def value(self, value: Any) -> None:
        with TURN:
            if value in self.offered:
                self.control.value = value
                return
            if value != value:  # NaN, which no list finds again
                raise LabError(
                    f"{self.name}={value!r} is no value to choose; listed: {', '.join(map(str, self.offered))}."
                )
            self._own = True  # given in code: whether it is legal, the config says
            try:
                self.control.offer([*self.offered, value], value)
            finally:
                self._own = False
            if self._seen:
                self._seen(self.name)

    def fix(self, value: Any) -> None:
        value = "–" if value is None else value
        self.control.offer([value], value)

    def offer(self, choices: Sequence[Choice], value: Any, *, word: str = "", why: str = "") -> None:
        """Lists the legal ones of ``choices``, sets ``value``, says the reasons of the rest; ``why`` disables the whole.

        A ``value`` that is not legal is listed too: the control shows what the config has."""
        legal = [c.value for c in choices if not c.reason]
        if value not in legal and value == value:
            legal.append(value)
        self.control.offer(legal, value if value in legal else None)  # NaN is in no list
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


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
