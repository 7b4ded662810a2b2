"""Graph replays as things: the kernels of one launch, aligned node by node over launches of the same graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.padding import PADDING_COLUMNS, PRE_COLUMNS, batches, pre_kernels
from dspark_lab.trace import Trace, TraceSet, open_trace

NODE_COLUMNS = (
    "rank", "graph", "node", "name", "num_replays", "dur_us_p10", "dur_us_p50", "dur_us_p90", "dur_us_max", "gap_us_p50", "gap_us_p90", "gap_us_max",
)  # fmt: skip
LAUNCH_COLUMNS = (
    "rank", "graph", "step", "correlation", "ts_ns", "call_us", "lead_us", "num_nodes", "is_complete", "span_us", "busy_us", "gap_us", "profiled",
    *PRE_COLUMNS, *PADDING_COLUMNS,
)  # fmt: skip
_INTS = (
    "rank",
    "node",
    "num_replays",
    "step",
    "correlation",
    "ts_ns",
    "num_nodes",
    "num_pre_kernels",
    "batch",
    "captured_batch",
)


@dataclass(frozen=True)
class Replays:
    """Graph replays of a trace.

    launches: one row a replay: graph (``graph 7`` by its id, else ``graph A``, ``graph B`` by what it holds), step, correlation, ts_ns and
        call_us of the launch, lead_us, num_nodes (device events), is_complete (False: fewer than the fullest replay of its graph),
        span_us (first start to last end), busy_us, gap_us (span not busy); num_pre_kernels, pre_kernels_us, pre_kernels: kernels launched singly
        just before it in its step; batch, captured_batch, captured_source: rows asked for and rows captured, see ``dspark_lab.analysis.padding``.
    nodes: one row a node of a graph: name, num_replays it was found in, its duration and the gap before it over replays. Complete replays
        count, and of the others the nodes that could be placed (by node id, else in order).
    """

    launches: pd.DataFrame
    nodes: pd.DataFrame

    def _repr_html_(self) -> str:
        done = self.launches["is_complete"]
        head = f"<p>{len(self.launches)} graph replays, {int((~done).sum())} incomplete (profiled)</p>"
        return head + self.nodes.to_html(index=False, float_format=lambda x: f"{x:.2f}", max_rows=40)


def replays(source: Any) -> Replays:
    """Graph replays of a trace, or of each rank of several: aligned node by node, incomplete ones flagged.

    Nodes are told by their ids where every event of a graph has one, else by their order: this is sound on one stream, and on several as
    long as their interleaving repeats (nodes are ordered by stream, then time, where there are several).
    """
    opened = open_trace(source)
    parts = [_of_rank(t) for t in (opened.values() if isinstance(opened, TraceSet) else [opened])]
    launches = [p[0] for p in parts if len(p[0])]
    nodes = [p[1] for p in parts if len(p[1])]
    return Replays(
        launches=pd.concat(launches, ignore_index=True) if launches else _empty(LAUNCH_COLUMNS),
        nodes=pd.concat(nodes, ignore_index=True) if nodes else _empty(NODE_COLUMNS),
    )


def _empty(columns: tuple[str, ...]) -> pd.DataFrame:
    def kind(c: str) -> Any:
        return (
            np.int64
            if c in _INTS
            else bool
            if c in ("is_complete", "profiled")
            else object
            if c in ("graph", "name", "pre_kernels", "captured_source")
            else float
        )

    return pd.DataFrame({c: pd.Series(dtype=kind(c)) for c in columns})


def _of_rank(trace: Trace) -> tuple[pd.DataFrame, pd.DataFrame]:
    device, calls = trace.linked.device, trace.linked.calls
    if not len(calls) or not calls["is_graph"].any():
        return _empty(LAUNCH_COLUMNS), _empty(NODE_COLUMNS)
    in_graph = np.zeros(len(calls) + 1, dtype=bool)
    in_graph[:-1] = calls["is_graph"].to_numpy()
    rows = np.flatnonzero(in_graph[device["call"].to_numpy()])
    table = pd.DataFrame(
        {
            "call": device["call"].to_numpy()[rows],
            "stream": device["stream"].to_numpy()[rows],
            "start": device["ts_ns"].to_numpy()[rows],
            "end": trace.sound_ends_ns[rows],
            "code": device["name"].cat.codes.to_numpy()[rows],
            "node_id": device["graph_node_id"].to_numpy()[rows],
            "graph_id": device["graph_id"].to_numpy()[rows],
        }
    ).sort_values(["call", "stream", "start"], kind="stable")
    names = device["name"].cat.categories.astype(str).tolist()
    groups = {int(c): g for c, g in table.groupby("call", sort=True)}  # pyright: ignore[reportArgumentType]
    if not groups:  # graphs were launched, and nothing of them was recorded on the device
        return _empty(LAUNCH_COLUMNS), _empty(NODE_COLUMNS)
    label = _graphs(groups)
    whole = {
        g: max((c for c in groups if label[c] == g), key=lambda c: len(groups[c]))
        for g in dict.fromkeys(label.values())
    }
    lead = trace.launches().set_index("ts_ns")["lead_us"]
    lead = lead[~lead.index.duplicated()]
    launch_rows, node_rows = [], []
    for call, own in groups.items():
        graph, model = label[call], groups[whole[label[call]]]
        start, end = own["start"].to_numpy(), own["end"].to_numpy()
        begin, until = int(start.min()), int(end.max())
        busy, before = _merged(start, end)
        of = calls.iloc[call]
        launch_rows.append(
            (
                trace.rank, graph, int(trace.step_windows.label(np.array([of["place"]]))[0]), int(of["correlation"]), int(of["ts_ns"]),
                float(of["dur_ns"]) / 1000, float(lead.get(int(of["ts_ns"]), np.nan)), len(own), len(own) == len(model), (until - begin) / 1000,
                busy / 1000, (until - begin - busy) / 1000, trace.profiled,
            )
        )  # fmt: skip
        at = _align(own, model)
        placed = at >= 0
        node_rows.append(
            pd.DataFrame(
                {"graph": graph, "node": at[placed], "dur": (end - start)[placed] / 1000, "gap": before[placed] / 1000}
            )
        )
    own = [c for c in LAUNCH_COLUMNS if c not in (*PRE_COLUMNS, *PADDING_COLUMNS)]
    launches = pd.DataFrame(launch_rows, columns=own, index=pd.Index(list(groups)))
    launches = launches.join(pre_kernels(trace)).sort_values("ts_ns", ignore_index=True)
    launches = launches.join(batches(trace, launches))[list(LAUNCH_COLUMNS)]
    every = pd.concat(node_rows, ignore_index=True)
    by = every.groupby(["graph", "node"], sort=True)
    nodes = pd.DataFrame(
        {
            "num_replays": by.size(),
            **{
                f"dur_us_{k}": by["dur"].quantile(q)
                for k, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0))
            },
            **{f"gap_us_{k}": by["gap"].quantile(q) for k, q in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))},
        }
    ).reset_index()
    models = {g: groups[c]["code"].to_numpy() for g, c in whole.items()}
    nodes["name"] = [str(names[models[g][k]]) for g, k in zip(nodes["graph"], nodes["node"], strict=True)]
    nodes["rank"] = trace.rank
    return launches[list(LAUNCH_COLUMNS)], nodes[list(NODE_COLUMNS)]


def _merged(start: np.ndarray, end: np.ndarray) -> tuple[int, np.ndarray]:
    """(time covered, gap before each event in the order given), ns; the first has none."""
    order = np.argsort(start, kind="stable")
    s, e = start[order], end[order]
    running = np.concatenate((s[:1], np.maximum.accumulate(e)[:-1]))
    gap = np.empty(len(s), dtype=np.int64)
    gap[order] = s - running
    return int((np.maximum.accumulate(e) - np.maximum(s, running)).clip(min=0).sum()), gap


def _graphs(groups: dict[int, pd.DataFrame]) -> dict[int, str]:
    """Which graph each launch replays: by id, else launches of the same kernels in the same order, and those that hold a part of one."""
    ids = {c: int(g["graph_id"].iloc[0]) for c, g in groups.items()}
    if all(i >= 0 for i in ids.values()):
        return {c: f"graph {i}" for c, i in ids.items()}
    known: dict[tuple[int, ...], int] = {}
    of: dict[int, int] = {}
    words = {c: tuple(g["code"].tolist()) for c, g in groups.items()}
    for call in sorted(groups, key=lambda c: -len(words[c])):
        word = words[call]
        if word not in known:
            longer = (k for model, k in known.items() if len(model) > len(word) and _within(word, model))
            known[word] = next(longer, len(known))
        of[call] = known[word]
    order = {k: i for i, k in enumerate(dict.fromkeys(of[c] for c in sorted(of)))}
    return {c: f"graph {_letter(order[k])}" for c, k in of.items()}


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else str(i + 1)


def _within(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether ``whole`` holds ``part`` in order and ``part`` is most of it."""
    if len(part) * 2 < len(whole):
        return False
    rest = iter(whole)
    return all(x in rest for x in part)


def _align(own: pd.DataFrame, model: pd.DataFrame) -> np.ndarray:
    """The node of the model that each event of a replay is; −1 where it cannot be placed."""
    if (model["node_id"] >= 0).all() and model["node_id"].is_unique and (own["node_id"] >= 0).all():
        place = {int(i): k for k, i in enumerate(model["node_id"])}
        return np.array([place.get(int(i), -1) for i in own["node_id"]])
    if len(own) == len(model):
        return np.arange(len(own))
    codes, k, out = model["code"].tolist(), 0, []
    for code in own["code"]:
        try:
            k = codes.index(code, k) + 1
            out.append(k - 1)
        except ValueError:
            out.append(-1)
    return np.array(out, dtype=np.int64)
