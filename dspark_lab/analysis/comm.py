"""Which kernels communicate, which of them belong together over ranks, and how far the ranks' clocks are apart."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from dspark_lab.errors import LabError
from dspark_lab.trace import Trace

#: Kernels that move data between ranks: a label and a regular expression searched in the name, without regard to case.
COMM_PATTERNS: dict[str, str] = {
    "RCCL": r"rccl",
    "NCCL": r"nccl",
    "DeepEP": r"deep_?ep|\b(?:intranode|internode|internode_ll)::|(?:notify|cached_notify)_dispatch",
    "nvshmem": r"nvshmem|rocshmem",
    "custom all-reduce": r"cross_device_reduce|(?:one|two)_?shot_(?:all_?reduce|push|pull)|custom_?all_?reduce|multimem_(?:all|one_shot)|quick_?reduce"
    r"|all_?reduce_(?:fusion|lamport|kernel|one_?shot|two_?shot)|lamport|symm_mem|reduce_scatter_kernel|all_?to_?all|all_?gather_kernel|moe_?a2a|nvlink_barrier",
}  # fmt: skip
#: Names that look like one of the above and are none.
_NOT = re.compile(r"at::native::|cutlass|gemm", re.IGNORECASE)
MATCH_COLUMNS = ("step", "ordinal", "name", "rank", "row", "ts_ns", "dur_us", "peer_wait_us")
#: Matched collectives of one job end within microseconds of each other; ends further apart than this are of clocks that drift, or of other jobs.
SURE_US = 20.0
CLOCK_COLUMNS = ("rank", "offset_us", "uncertainty_us", "num_collectives")


def comm_labels(names: pd.Series, patterns: Mapping[str, str] | None = None) -> np.ndarray:
    """The label of each kernel name that communicates, "" for the others.

    ``patterns`` adds to ``COMM_PATTERNS`` (a label of the same name replaces ours).
    """
    own = _compiled(patterns)
    given = {k: re.compile(p, re.IGNORECASE) for k, p in COMM_PATTERNS.items() if k not in own}
    compiled = [(label, p, label in own) for label, p in (own | given).items()]
    codes, different = pd.factorize(names)
    found = []
    for name in different:
        text = str(name)
        label = next((lb for lb, p, own in compiled if p.search(text) and (own or not _NOT.search(text))), "")
        found.append(label)
    return np.array([*found, ""], dtype=object)[codes]


def _compiled(patterns: Mapping[str, str] | None) -> dict[str, re.Pattern[str]]:
    """The user's table. Raises `LabError` where it is none."""
    if patterns is not None and not (
        isinstance(patterns, Mapping) and all(isinstance(x, str) and x for kv in patterns.items() for x in kv)
    ):
        raise LabError(
            f"comm_patterns={patterns!r:.80} is no table of names; give {{'ours': '^my_all_to_all'}}: a label, a regular expression."
        )
    found = {}
    for label, pattern in (patterns or {}).items():
        try:
            found[label] = re.compile(pattern, re.IGNORECASE)
        except re.error as err:
            raise LabError(f"comm_patterns[{label!r}]={pattern!r} is no regular expression: {err}.") from err
    return found


def match_collectives(traces: Mapping[int, Trace], patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Communication kernels that belong together over ranks: by step, order within it, and label.

    Columns: step, ordinal (within the step), name, rank, row (of ``trace.linked.device``), ts_ns, dur_us, peer_wait_us (its time beyond that of the rank that
    was quickest, which came last). Steps in which the ranks disagree on number or kind are left out.
    """
    tables = []
    for rank, trace in traces.items():
        device = trace.linked.device
        labels = comm_labels(device["name"], patterns)
        rows = np.flatnonzero(
            (labels != "") & (device["category"] == "kernel").to_numpy() & (device["place"] >= 0).to_numpy()
        )
        rows = rows[np.argsort(device["ts_ns"].to_numpy()[rows], kind="stable")]
        of = device.iloc[rows]
        one = pd.DataFrame(
            {
                "step": trace.step_windows.label(of["place"].to_numpy()).astype(np.int64),
                "name": of["name"].astype(str).to_numpy(dtype=object),
                "label": labels[rows],
                "rank": rank,
                "row": rows,
                "ts_ns": of["ts_ns"].to_numpy(),
                "dur_us": (trace.sound_ends_ns[rows] - of["ts_ns"].to_numpy()) / 1000,
            }
        )
        one["ordinal"] = one.groupby("step").cumcount()
        tables.append(one)
    none = pd.DataFrame(
        {c: pd.Series(dtype=object if c == "name" else float if c.endswith("_us") else np.int64) for c in MATCH_COLUMNS}
    )
    if len(tables) < 2:
        return none
    every = pd.concat(tables, ignore_index=True)
    if not len(every):
        return none
    key = ["step", "ordinal"]
    every["ranks"] = every.groupby(key)["rank"].transform("nunique")
    every["labels"] = every.groupby(key)["label"].transform("nunique")
    sound = (every["ranks"] == len(traces)) & (every["labels"] == 1)
    whole = sound.groupby(every["step"]).transform("all")
    every = every[whole].copy()
    every["peer_wait_us"] = every["dur_us"] - every.groupby(key)["dur_us"].transform("min")
    return every[list(MATCH_COLUMNS)].sort_values([*key, "rank"], ignore_index=True)


def not_together(apart: pd.DataFrame) -> str:
    """Why the ranks of a table of `clocks` are hardly those of one capture; "" where nothing speaks against it."""
    worst = float(apart["uncertainty_us"].max()) if len(apart) else 0.0
    if worst <= SURE_US:
        return ""
    return f"collectives that match end ± {worst:.0f} µs apart: the clocks drift, or these are not ranks of one capture"


def clocks(traces: Mapping[int, Trace], patterns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """How far each rank's clock is ahead of the lowest rank's, from the ends of matched collectives (which are nearly the same moment).

    Columns: rank, offset_us (median), uncertainty_us (half the range between the 10th and the 90th percentile), num_collectives.
    """
    matched = match_collectives(traces, patterns)
    rows = []
    if len(matched):
        ends = matched.assign(end=matched["ts_ns"] + (matched["dur_us"] * 1000).round().astype(np.int64))
        wide = ends.pivot(index=["step", "ordinal"], columns="rank", values="end")
        first = wide.columns[0]
        for rank in wide.columns:
            apart = (wide[rank] - wide[first]).to_numpy() / 1000
            low, high = np.percentile(apart, [10, 90])
            rows.append((int(rank), float(np.median(apart)), float(high - low) / 2, len(apart)))
    table = pd.DataFrame(rows, columns=list(CLOCK_COLUMNS))
    return table.astype({"rank": np.int64, "offset_us": float, "uncertainty_us": float, "num_collectives": np.int64})
