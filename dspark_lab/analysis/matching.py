"""Parts of two sides side by side: kernels find their counterpart by name, or through templates, tile sizes and versions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

PART_COLUMNS = ("kind", "name", "site", "before_us", "after_us", "delta_us", "count_before", "count_after", "matched")


def mean_parts(tables: list[pd.DataFrame]) -> pd.DataFrame:
    every = pd.concat(tables)
    out = every.groupby(["kind", "name", "site"], sort=False)[["us", "count"]].sum().reset_index()
    out[["us", "count"]] /= len(tables)
    return out


def plain_name(name: str) -> str:
    """A kernel's name without what a compiler or a version puts into it: return type, template arguments, parameters, tile sizes, hashes."""
    text = re.sub(r"\((?:anonymous namespace|lambda[^)]*)\)(?:::)?", "", name)
    text = re.sub(r"^(?:void|static|__global__)\s+", "", text.strip())
    mangled = re.match(r"^_Z", text) is not None
    if not mangled:
        depth, out = 0, []
        for ch in text:
            if ch in "<([":
                depth += 1
            elif ch in ">)]":
                depth = max(0, depth - 1)
            elif depth == 0:
                out.append(ch)
        text = "".join(out)
    text = re.sub(r"\b(?:v|version_?)\d+(?:_\d+)*(?=::|_|\b)", "v", text)
    text = re.sub(r"(?<![a-zA-Z])0x[0-9a-f]+|[0-9a-f]{12,}", "#", text)
    text = re.sub(r"\d+(?:x\d+)+", "#", text)
    text = re.sub(r"(?<=_)\d+(?=_|$)", "#", text)
    text = re.sub(r"(?:_#)+(?=_|$)", "_#", text)
    return re.sub(r"\s+", " ", text).strip() or name


def match_parts(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Parts of both sides side by side; kernels by name, then by plain name, the rest as found on one side only."""
    key = ["kind", "name", "site"]
    both = before.merge(after, on=key, how="outer", suffixes=("_before", "_after"), sort=False, indicator=True)
    named = both["kind"].isin(("kernel", "communication", "copy")).to_numpy()
    alone = named & (both["_merge"] != "both").to_numpy()
    sure = both[~alone].copy()
    sure["matched"] = "name"
    rest = both[alone].copy()
    rows = [sure]
    if len(rest):
        rest["plain"] = [plain_name(n) for n in rest["name"]]
        for (kind, plain), group in rest.groupby(["kind", "plain"], sort=False):
            has = set(group["_merge"])
            if {"left_only", "right_only"} <= has:
                sums = group[["us_before", "us_after", "count_before", "count_after"]].sum()
                rows.append(
                    pd.DataFrame([{"kind": kind, "name": plain, "site": "", **sums.to_dict(), "matched": "template"}])
                )
            else:
                rows.append(group.assign(matched="only before" if "left_only" in has else "only after"))
    every = pd.concat(rows, ignore_index=True)
    for c in ("us_before", "us_after", "count_before", "count_after"):
        every[c] = every[c].fillna(0.0).astype(float)
    every = every.rename(columns={"us_before": "before_us", "us_after": "after_us"})
    every["delta_us"] = every["after_us"] - every["before_us"]
    every = every.iloc[np.argsort(-every["delta_us"].abs().to_numpy(), kind="stable")].reset_index(drop=True)
    return every[list(PART_COLUMNS)]


def table_of(rows: Iterable[Any]) -> pd.DataFrame:
    text = ("kind", "name", "site", "matched")
    return pd.DataFrame(list(rows), columns=list(PART_COLUMNS)).astype(
        {c: object if c in text else float for c in PART_COLUMNS}
    )


# -- interval, verdict, words ----------------------------------------------------------------------------------------
