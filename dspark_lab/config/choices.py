"""The legal values of every toggle, and what each name of `alloc` stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from dspark_lab.config.shipped import TEXT_KINDS
from dspark_lab.errors import LabError, unknown

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")
WEIGHTS = ("bigram", "random", "checkpoint")
MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")
DRAFTERS = ("dspark", "dflash", "eagle3", "lookup")
"""What drafts: a block at once, with or without a Markov head; one token after another; the request's own text."""
PLACEMENTS = ("contiguous", "round_robin", "balanced")
DISPATCHERS = ("all_reduce", "all_gather", "all_to_all", "symm_mem")
"""Those that come with the lab; other packages bring more, see `ep.registry`."""
NEED_ALIKE = ("all_reduce",)
"""Dispatchers that want all rows on every rank."""
TAKE_BOTH = ("symm_mem",)
"""Dispatchers that have a way of their own for rows that are alike; the others are handed chunks of them."""
PADDING_POLICIES = ("mask", "zero", "ignore")
EXPERT_LOADS = ("own", "uniform", "zipf", "one_hot", "adversarial")
VERIFY = ("static", "threshold", "scheduled")
MIN_TEMPERATURE = 1e-5
"""Below, logits over the temperature lose what tells them apart; 0 itself is greedy."""
LAYOUTS = ("padded", "compact")
TEXTS = ("random", "mixed", *TEXT_KINDS)
"""What prompts of a measured run are: random ids, or held-out text as bytes, of one kind or of all in turn."""
TRANSFERS = ("none", "blocking", "non_blocking", "pinned", "persistent", "graph_slot")
GUARDS = ("never", "always", "on_demand")


@dataclass(frozen=True, kw_only=True)
class Alloc:
    """How the draft batch's `num_token_non_padded` reaches the device, and when it is built at all."""

    transfer: str
    guard: str
    origin: str

    def builds(self, predicate: bool) -> bool:
        """Whether the scalar is built in a step, given `enable_num_token_non_padded`."""
        return self.guard == "always" or (self.guard == "on_demand" and predicate)


ALLOCS: dict[str, Alloc] = {
    "none": Alloc(transfer="none", guard="never", origin="before sglang #33465"),
    "blocking": Alloc(transfer="blocking", guard="always", origin="sglang #33465, the regression"),
    "non_blocking": Alloc(transfer="non_blocking", guard="always", origin="sglang #34782 alone"),
    "on_demand": Alloc(transfer="non_blocking", guard="on_demand", origin="sglang #34759, the fix"),
    "pinned": Alloc(transfer="pinned", guard="on_demand", origin="a ring of pinned ints"),
    "persistent": Alloc(transfer="persistent", guard="on_demand", origin="later sglang: one device buffer, filled"),
    "graph_slot": Alloc(transfer="graph_slot", guard="on_demand", origin="ours: the captured graph's own input"),
}


def parse_alloc(name: str) -> Alloc:
    """The transfer and guard behind ``name``: one of `ALLOCS`, or ``"transfer:guard"`` such as ``"pinned:always"``."""
    if name in ALLOCS:
        return ALLOCS[name]
    transfer, colon, guard = str(name).partition(":")
    if not colon:
        raise unknown("alloc", name, ALLOCS)
    if transfer not in TRANSFERS:
        raise unknown("transfer", transfer, TRANSFERS)
    if guard not in GUARDS:
        raise unknown("guard", guard, GUARDS)
    if (transfer == "none") != (guard == "never"):
        raise LabError(
            f"alloc={name!r} contradicts itself: transfer 'none' and guard 'never' go together; choose alloc='none', "
            f"or one of {', '.join(TRANSFERS[1:])} with guard always or on_demand."
        )
    return Alloc(transfer=transfer, guard=guard, origin="chosen by hand")


def alloc_name(transfer: str, guard: str) -> str:
    """The shortest name for a transfer and a guard: the inverse of `parse_alloc`."""
    for name, alloc in ALLOCS.items():
        if (alloc.transfer, alloc.guard) == (transfer, guard):
            return name
    parse_alloc(f"{transfer}:{guard}")
    return f"{transfer}:{guard}"


@cache
def foreign_dispatchers() -> dict[str, str]:
    """Name → ``module:callable`` of the dispatchers that installed packages declare."""
    return {e.name: e.value for e in entry_points(group="dspark_lab.dispatchers")}


def is_dispatcher(name: object) -> bool:
    """Whether ``name`` may stand in a config: a known dispatcher, or ``package.module:callable``."""
    if not isinstance(name, str):
        return False
    return name in DISPATCHERS or name in foreign_dispatchers() or re.fullmatch(r"[\w.]+:\w+", name) is not None
