"""A native select whose options keep their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as W

HIDDEN = " ✕"
"""Ends the label of an option that is not offered; the panel's style hides it (where a browser cannot, it is refused when chosen)."""


class Select(W.Dropdown):
    """Lists some of the values it knows. ``say`` gives a value's label.

    The browser names what a person chose by its place in the list, and the list that it shows may be an answer old. So a value
    never leaves its place: one that is not offered is hidden, a new one is put behind the others.
    """

    def __init__(self, values: Iterable[Any], value: Any, *, say: Callable[[Any], str] = str, **settings: Any) -> None:
        self._say = say
        self.places = list(dict.fromkeys(values))
        self.offered: list[Any] = list(self.places)
        """The values that can be chosen, in the order of the list."""
        super().__init__(options=self._options(), value=value, **settings)

    def know(self, values: Iterable[Any]) -> None:
        """Gives ``values`` their places, in this order where they are new; the next `offer` lists them."""
        self.places += [v for v in dict.fromkeys(values) if v not in self.places]

    def offer(self, values: Iterable[Any], value: Any) -> None:
        """Offers ``values`` and chooses ``value``, one of them or None."""
        values = list(values)
        self.know(values)
        self.offered = [v for v in self.places if v in values]
        options = self._options()
        with self.hold_sync():  # one message, so that the list is never there without its choice
            if self.options != options:
                self.options = options
            if self.value != value:
                self.value = value

    def _options(self) -> tuple[tuple[str, Any], ...]:
        return tuple((self._say(v) + ("" if v in self.offered else HIDDEN), v) for v in self.places)
