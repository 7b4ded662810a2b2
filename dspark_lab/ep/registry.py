"""Dispatchers by name: those of the lab, and any that another package brings.

A foreign one is a callable that takes an `EpContext` and returns a `Dispatcher`. It is named in a config as
``"package.module:callable"``, or by a short name that its package declares as an entry point of the group
``dspark_lab.dispatchers``; ranks are processes of their own and import it there. `EpContext.rows_alike` tells it whether all
ranks hand it the same rows (``attn_dp=1``) or each its own; one that can do only the latter refuses, or wraps itself in
`shards.ChunkedRows`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from dspark_lab.config.choices import DISPATCHERS, foreign_dispatchers
from dspark_lab.ep.all_to_all import AllToAllDispatcher
from dspark_lab.ep.dispatch import AllReduceDispatcher, Dispatcher, EpContext
from dspark_lab.ep.gather import AllGatherDispatcher
from dspark_lab.ep.symmetric import symmetric
from dspark_lab.errors import LabError, unknown

Factory = Callable[[EpContext], Dispatcher]

BUILT_IN: dict[str, Factory] = {
    "all_reduce": AllReduceDispatcher,
    "all_gather": AllGatherDispatcher,
    "all_to_all": AllToAllDispatcher,
    "symm_mem": symmetric,
}
assert tuple(BUILT_IN) == DISPATCHERS


def factory_of(name: str) -> Factory:
    """The factory called ``name``. Raises `LabError` where there is none, or where it cannot be imported."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    foreign = foreign_dispatchers()
    path = foreign.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise unknown("dispatcher", name, [*DISPATCHERS, *foreign])
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise LabError(f"dispatcher={name!r} cannot be imported: {e}; give it as 'package.module:callable'.") from None
    if not callable(found):
        raise LabError(
            f"dispatcher={name!r} is a {type(found).__name__} and must be a callable that takes an EpContext."
        )
    return cast(Factory, found)
