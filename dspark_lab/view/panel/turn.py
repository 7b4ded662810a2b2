"""Whose turn it is. A kernel hears its panels from several threads, cells and a watch on one, comms on subshells of their own: one at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

TURN = threading.RLock()
"""Held from before a message changes its widget until the panel has answered it, and while code sets a toggle."""


def in_turn(widget: Any) -> None:
    """Makes messages from the browser wait for their turn, for ``widget`` and all below it.

    Without that a choice is lost where it comes while another is answered: the kernel takes it for one of the values that
    the panel itself is setting, or both write the same widget.
    """
    if (comm := getattr(widget, "comm", None)) is not None:
        comm.handle_msg = _waiting(comm.handle_msg)
        if hasattr(
            comm, "_reply_subshell_for"
        ):  # ipykernel 7.4 hears each widget on the thread that wrote it last: out of order
            comm._reply_subshell_for = None
    for child in getattr(widget, "children", ()):
        in_turn(child)


def _waiting(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(handle)
    def waiting(msg: Any) -> Any:
        with TURN:
            return handle(msg)

    return waiting
