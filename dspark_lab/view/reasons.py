"""Why a toggle's value cannot be chosen now: the rule of the config that it breaks, or the recordings that there are. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dspark_lab.config import ALLOCS, LabConfig
from dspark_lab.errors import LabError

WORDS = {"ep_size": "EP", "tp_size": "TP", "batch_size": "batch", "block_size": "γ", "alloc": "", "use_graph": "graphs"}
FACETS = ("tp_size", "ep_size", "batch_size", "block_size")
"""What tells recordings apart, besides `alloc`; the first one a user turns wins over the rest."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a toggle; ``reason`` is empty where it can be chosen."""

    value: Any
    reason: str = ""


def why_not(cfg: LabConfig, **change: Any) -> str:
    """The rule that ``cfg`` with ``change`` breaks, in a few words; empty where it is legal."""
    try:
        cfg.replace(**change)
    except LabError as e:
        return brief(str(e), change)
    return ""


def brief(text: str, change: dict[str, Any]) -> str:
    """The first clause of a `LabError`, in the panel's words; the whole text stands in the tooltip."""
    if change.get("alloc") == "graph_slot" and "use_graph" in text:
        return "graph_slot needs graphs (More)"
    if "num_token_non_padded None" in text:
        return f"{change.get('alloc', 'none')} leaves the mask without its scalar at EP > 1 (turn mask padding off)"
    head = text.split("; ")[0].split(". ")[0].rstrip(".")
    for name, value in change.items():
        head = head.replace(f"{name}={value!r}", f"{WORDS.get(name, name)} {value}".strip())
    return head


def here(cfg: LabConfig, name: str, values: Iterable[Any]) -> list[Choice]:
    """Which ``values`` of a toggle could be measured on this machine with the other toggles as they are."""
    return [Choice(value=v, reason=why_not(cfg, **{name: v})) for v in values]


def arms_here(cfg: LabConfig) -> list[Choice]:
    """Which strategies are legal with the other toggles as they are."""
    return here(cfg, "alloc", ALLOCS)


def on_record(table: pd.DataFrame, name: str, values: Iterable[Any]) -> list[Choice]:
    """Which ``values`` of a facet have a recording at all."""
    have = sorted(set(table[name]))
    word = WORDS[name]
    there = f"{word} {_listed(have)}"
    return [
        Choice(
            value=v,
            reason=""
            if v in have
            else f"no recording at {word} {v}: there {'is' if len(have) == 1 else 'are'} {there}",
        )
        for v in sorted({*values, *have})
    ]


def arms_on_record(table: pd.DataFrame, at: dict[str, Any]) -> list[Choice]:
    """Which strategies have a recording at the facets ``at``."""
    have = list(matching(table, at)["alloc"])
    where = ", ".join(f"{WORDS[k]} {v}" for k, v in at.items() if k in ("tp_size", "ep_size"))
    return [
        Choice(value=a, reason="" if a in have else f"no recording at {where}") for a in dict.fromkeys([*ALLOCS, *have])
    ]


def matching(table: pd.DataFrame, at: dict[str, Any]) -> pd.DataFrame:
    """Rows of the recordings at these facets."""
    for name, value in at.items():
        table = table[table[name] == value]
    return table


def snapped(table: pd.DataFrame, at: dict[str, Any], turned: str | None) -> dict[str, Any]:
    """The facets of the recording nearest to ``at`` that has the value just ``turned``; what was asked for comes first."""
    order = [f for f in FACETS if f == turned] + [f for f in FACETS if f != turned]
    found: dict[str, Any] = {}
    rows = table
    for name in order:
        value = at.get(name)
        hit = rows[rows[name] == value]
        rows = hit if len(hit) else rows[rows[name] == rows[name].iloc[0]]
        found[name] = rows[name].iloc[0].item() if hasattr(rows[name].iloc[0], "item") else rows[name].iloc[0]
    return {f: found[f] for f in FACETS}


def said(choices: Iterable[Choice], *, named: bool = False) -> str:
    """The reasons of what cannot be chosen, each once; ``named`` puts the values before their reason."""
    groups: dict[str, list[str]] = {}
    for c in choices:
        if c.reason:
            groups.setdefault(c.reason, []).append(str(c.value))
    if not named:
        return "; ".join(groups)
    return "; ".join(
        reason if len(v) == 1 and v[0] in reason else f"{', '.join(v)}: {reason}" for reason, v in groups.items()
    )


def merged(choices: list[Choice], word: str) -> str:
    """As `said`, with "no recording at EP 2: …, no recording at EP 4: …" told as one line."""
    missing = [c for c in choices if c.reason.startswith("no recording at")]
    if len(missing) < 2:
        return said(choices)
    tail = missing[0].reason.split(": ", 1)[1]
    return f"no recording at {word} {_listed([c.value for c in missing])}: {tail}"


def _listed(values: list[Any]) -> str:
    return ", ".join(str(v) for v in values)


def not_live(cfg: LabConfig, **change: Any) -> str:
    """Why this version cannot run ``cfg`` with ``change`` here, though a recording may have it; empty where it can."""
    try:
        from dspark_lab.engine.decode import check_runnable
    except ImportError:
        return "nothing runs here without torch: pip install 'dspark-lab[lab]'"
    try:
        check_runnable(cfg.replace(**change))
    except LabError as e:
        (name, value), *_ = change.items()
        return (
            f"{WORDS.get(name, name)}{'' if value is True else f' {value}'}: recordings only"
            if "live" in str(e)
            else brief(str(e), change)
        )
    return ""
