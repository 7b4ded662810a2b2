"""The recordings that ship, as the panel asks for them: a row a run, read without its steps, so that many open fast."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from dspark_lab.config import LabConfig
from dspark_lab.errors import LabError
from dspark_lab.runs import store
from dspark_lab.runs.plan import is_floor

FACETS = ("preset", "tp_size", "ep_size", "batch_size", "host_work_us", "use_graph", "mask_padding", "block_size", "dispatcher",
          "placement", "attn_dp")  # fmt: skip
"""What tells recordings apart, besides `alloc`; the one a person turns wins over the rest."""
SPREAD = ("ep_size", "dispatcher", "placement", "attn_dp")
"""What a sweep over EP sizes varies."""
COLUMNS = ("name", "alloc", "role", "floor", *FACETS, "set", "device", "timed", "recorded_at")
_FREE = ("alloc", "mask_padding", "max_new_tokens")
"""Toggles in which the arms of one set may differ."""


def recordings() -> pd.DataFrame:
    """A row a run that ships. ``set``: which of them were measured beside each other; ``floor``: the mask-off arm at EP > 1;
    ``timed``: with step tables of its own, not only a quoted median. Raises `LabError` for a run that cannot be read."""
    rows = [_row(name) for name in store.recorded_names()]
    table = pd.DataFrame(rows, columns=[*COLUMNS, "key"])
    if len(table):
        number = table.groupby(["set", *FACETS])["key"].transform(lambda keys: pd.factorize(keys)[0])
        table["set"] = [s if n == 0 else f"{s} {n + 1}" for s, n in zip(table["set"], number, strict=True)]
    return table.drop(columns="key")


def _row(name: str) -> dict[str, Any]:
    path = store.data_dir() / "recorded" / name / "run.json"
    try:
        state = path.stat()
    except OSError as e:
        raise LabError(f"{path} cannot be read as a run: {e}") from None
    return _row_of(name, path, state.st_mtime_ns, state.st_size)


@cache
def _row_of(name: str, path: Path, *state: int) -> dict[str, Any]:
    """The row of one file, read again where its ``state`` (time of change, size) is another."""
    try:
        d = json.loads(path.read_text())
        cfg = LabConfig.from_dict(d["config"])
        environment, role = d["environment"], d["role"]
    except (OSError, ValueError, KeyError) as e:
        raise LabError(f"{path} cannot be read as a run: {e}") from None
    flat = cfg.to_dict()
    floor = is_floor(cfg) and cfg.parallel.ep_size > 1
    return {
        "name": name,
        "alloc": cfg.engine.alloc,
        "role": role,
        "floor": floor,
        **{f: flat[f] for f in FACETS},
        "mask_padding": cfg.engine.mask_padding or floor,
        "set": store.sheet_of(name, cfg) + ("" if cfg.engine.speculate else ", no drafts"),
        "device": str(environment.get("device_name", "")),
        "timed": not d.get("quoted"),
        "recorded_at": str(environment.get("recorded_at", "")),
        "key": json.dumps({k: v for k, v in flat.items() if k not in _FREE}) + str(environment.get("device_name")),
    }


def matching(table: pd.DataFrame, at: dict[str, Any]) -> pd.DataFrame:
    """Rows of the recordings with these values."""
    for name, value in at.items():
        table = table[table[name] == value]
    return table


def sets_at(table: pd.DataFrame, at: dict[str, Any]) -> list[str]:
    """Names of the sets at these facets: with step tables first, then the one with more strategies, then the later."""
    rows = matching(table, at)
    rows = rows[rows["role"] == "arm"]
    by = rows.groupby("set", sort=True).agg(timed=("timed", "all"), arms=("name", "size"), when=("recorded_at", "max"))
    return list(by.sort_values(["timed", "arms", "when"], ascending=False, kind="stable").index)


def snapped(table: pd.DataFrame, at: dict[str, Any], turned: str | None) -> dict[str, Any]:
    """The facets of the recording nearest to ``at`` that has the value just ``turned``; what was asked for comes first."""
    order = [f for f in FACETS if f == turned] + [f for f in FACETS if f != turned]
    found: dict[str, Any] = {}
    rows = table[table["role"] == "arm"]
    for name in order:
        hit = rows[rows[name] == at.get(name)]
        rows = hit if len(hit) else rows[rows[name] == rows[name].iloc[0]]
        value = rows[name].iloc[0]
        found[name] = value.item() if hasattr(value, "item") else value
    return {f: found[f] for f in FACETS}


def chosen(table: pd.DataFrame, at: dict[str, Any], arms: list[str], *, floor: bool) -> pd.DataFrame:
    """Rows of the ``arms`` at these facets and set, the floor where asked for, and what was measured a second time of them."""
    rows = matching(table, at)
    return rows[(rows["alloc"].isin(arms) & ~rows["floor"]) | (rows["floor"] & floor)]


def over_ep(table: pd.DataFrame, at: dict[str, Any], arms: list[str], *, floor: bool) -> pd.DataFrame:
    """Rows of the ``arms`` at every EP size and spread recorded with the other facets of ``at``, each of one set: that of ``at``
    where it is there. At EP 1 ``none`` comes too: there it stands for all that build no scalar."""
    rest = {n: v for n, v in at.items() if n in FACETS and n not in SPREAD}
    rows = matching(table, {**rest, "role": "arm", "timed": True})
    parts = [rows.iloc[:0]]
    for values, here in rows.groupby(list(SPREAD), sort=True):
        sets = sets_at(here, dict(zip(SPREAD, values, strict=True)))
        wanted = {"set": at["set"] if at["set"] in sets else sets[0]}
        parts.append(chosen(here, wanted, [*arms, "none"] if values[0] == 1 else arms, floor=floor))
    return pd.concat(parts)
