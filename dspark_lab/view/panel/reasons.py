"""Why a toggle's value cannot be chosen now: the rule of the config that it breaks, or the recordings that there are. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dspark_lab.config import ALLOCS, LabConfig
from dspark_lab.errors import LabError
from dspark_lab.view.panel.recordings import matching

SPREAD = ("dispatcher", "placement", "attn_dp")
"""How experts and requests are spread over the ranks: of EP above 1."""
WORDS = {"dispatcher": "dispatcher", "placement": "placement", "attn_dp": "attention DP", "ep_size": "EP", "tp_size": "TP", "batch_size": "batch", "block_size": "γ", "alloc": "", "use_graph": "graphs", "preset": "preset",
         "host_work_us": "host work", "mask_padding": "mask padding"}  # fmt: skip
NO_TORCH = "no torch: pip install 'dspark-lab[lab]'"
FACETS = ("tp_size", "ep_size", "batch_size", "block_size", *SPREAD)
"""Toggles of a live run whose legal values depend on each other, in the order in which they are settled."""


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
        return "graph_slot needs CUDA graphs"
    if "num_token_non_padded None" in text:
        return f"{change.get('alloc', 'none')} leaves the mask without its scalar at EP > 1 (tick Floor)"
    if "wants all rows on every rank" in text:
        return "all_reduce has all rows on every rank: attention DP needs another dispatcher"
    if "wants every expert whole" in text and (name := next(iter(change))) != "ep_size":
        return (
            "attention DP goes up to the EP size"
            if name == "attn_dp"
            else f"{WORDS[name]} {change[name]} needs as many EP ranks"
        )
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
    tail = f"only {word} {_listed(have)}"
    return [
        Choice(value=v, reason="" if v in have else f"no recording at {word} {_listed([v])}: {tail}")
        for v in sorted({*values, *have})
    ]


def only_one(table: pd.DataFrame, name: str) -> str:
    """Said of a facet that has one value in all recordings; empty where it has several."""
    have = sorted(set(table[name]))
    return f"all recordings have {WORDS[name]} {_listed(have)}" if len(have) == 1 else ""


def switch_on_record(table: pd.DataFrame, name: str) -> list[Choice]:
    """Whether a facet that is on or off has recordings of both."""
    have = set(table[name])
    return [
        Choice(value=v, reason="" if v in have else f"no recording with{'' if v else 'out'} {WORDS[name]}")
        for v in (False, True)
    ]


def arms_on_record(table: pd.DataFrame, at: dict[str, Any]) -> list[Choice]:
    """Which strategies have a recording at the facets ``at``."""
    rows = matching(table, at)
    have = list(rows[(rows["role"] == "arm") & ~rows["floor"]]["alloc"])
    where = ", ".join(f"{WORDS[k]} {at[k]}" for k in ("tp_size", "ep_size") if k in at)
    return [
        Choice(value=a, reason="" if a in have else f"no recording at {where}") for a in dict.fromkeys([*ALLOCS, *have])
    ]


def no_torch() -> str:
    """Why nothing at all runs here; empty where torch can be imported."""
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return NO_TORCH
    return ""


def graphs_here(device: str) -> str:
    """Why CUDA graphs cannot run here; empty where they can."""
    if device == "cpu":
        return "CUDA graphs need device cuda"
    why = gpu_here()
    return "CUDA graphs need a GPU" if why else ""


def gpu_here() -> str:
    """Why nothing runs on a GPU here; empty where it does."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no GPU here"


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
    """As `said`, with "no recording at EP 2: …; no recording at EP 4: …" told as one line."""
    missing = [c for c in choices if c.reason.startswith("no recording at")]
    if len(missing) < 2:
        return said(choices)
    tail = missing[0].reason.split(": ", 1)[1]
    return f"no recording at {word} {_listed([c.value for c in missing])}: {tail}"


def _listed(values: list[Any]) -> str:
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


def not_live(cfg: LabConfig, **change: Any) -> str:
    """Why this version cannot run ``cfg`` with ``change`` here, though a recording may have it; empty where it can."""
    try:
        from dspark_lab.engine.runnable import check_runnable
    except ImportError:
        return NO_TORCH
    if change.get("dispatcher") == "symm_mem" and (cfg.engine.device == "cpu" or gpu_here()):
        return "symm_mem needs several GPUs of one host"
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
