"""Why is it slower: two traces, or two sets of captures, the delta of their steps and the causes that sum to it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.breakdown import COMMUNICATION, DeviceLine, breakdown, lines
from dspark_lab.analysis.intervals import t_interval
from dspark_lab.analysis.syncs import charge
from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet, open_trace
from dspark_lab.trace.summary import SKIPPED_STEPS

PART_COLUMNS = ("kind", "name", "site", "before_us", "after_us", "delta_us", "count_before", "count_after", "matched")
#: With one capture a side the interval knows nothing of how captures differ: a smaller delta is a tie.
WEAK_FLOOR_PCT = 1.0
_BOOTSTRAPS = 4000
#: Below this many steps a side a bootstrap is too narrow; Student's t over them instead.
_FEW_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Diff:
    """A delta of the step and its causes, in profiled time.

    before_us, after_us: medians of the step over the third step and later (over ranks the maximum; over captures their mean).
    interval: 95 % of the delta; weak: it is over steps, not over captures. verdict: ``slower``, ``faster``, ``tie`` or ``withheld``, reason why.
    parts: one row a cause, µs a step; kind is kernel, communication, peer_wait, copy, wait (the device was dry for a wait of the host), bubble
    (it was dry for host work), launch (launch latency, gaps between queued launches), graph_gap (between nodes of a graph);
    matched says how a name found its counterpart (``name``, ``template``, ``only before``, ``only after``). residual_us: delta less
    the parts. withheld: why there are no parts, "" where they stand.
    """

    before_us: float
    after_us: float
    interval: tuple[float, float]
    weak: bool
    verdict: str
    reason: str
    parts: pd.DataFrame
    sentence: str
    withheld: str
    profiled: bool = True

    @property
    def delta_us(self) -> float:
        return self.after_us - self.before_us

    @property
    def residual_us(self) -> float:
        return self.delta_us - float(self.parts["delta_us"].sum())

    @property
    def residual_limit_us(self) -> float:
        """The residual that this project calls small."""
        return min(5.0, 0.05 * abs(self.delta_us))

    def by_kind(self) -> pd.DataFrame:
        """The parts summed by kind: kind, before_us, after_us, delta_us."""
        return self.parts.groupby("kind", sort=False)[["before_us", "after_us", "delta_us"]].sum().reset_index()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        parts = [{"part": f"{r['kind']}: {r['name']}", **r} for r in self.parts.to_dict("records")]
        return {
            "statistic": "step_us_p50",
            "profiled": self.profiled,
            "before_us": self.before_us,
            "after_us": self.after_us,
            "delta_us_per_step": self.delta_us,
            "interval": list(self.interval),
            "ci95": list(self.interval),
            "weak": self.weak,
            "verdict": self.verdict,
            "reason": self.reason,
            "parts": parts,
            "residual_us": self.residual_us,
            "withheld": self.withheld,
            "sentence": self.sentence,
            "text": self.sentence,
        }

    def _repr_html_(self) -> str:
        shown = self.parts[(self.parts["delta_us"].abs() >= 0.5).to_numpy()]
        rest = float(self.parts["delta_us"].sum() - shown["delta_us"].sum())
        foot = f"<p>parts under 0.5 µs together {rest:+.1f} µs, residual {self.residual_us:+.2f} µs</p>"
        return f"<p>{self.sentence}</p>" + shown.to_html(index=False, float_format=lambda v: f"{v:.1f}") + foot


def diff(before: Any, after: Any, *, comm_patterns: Mapping[str, str] | None = None) -> Diff:
    """Compare the steps of two captures, or of two lists of captures of the same two things.

    Args:
        before, after: a trace, a folder of ranks, a run, or a list of these: several captures of one side.
        comm_patterns: more names of communication kernels.

    Raises:
        LabError: a side without steps on a device.
    """
    sides = [[_capture(s, comm_patterns) for s in _listed(x)] for x in (before, after)]
    medians = [np.array([c.step_us for c in side]) for side in sides]
    us = [float(m.mean()) for m in medians]
    interval, weak = _interval(sides, medians)
    delta = us[1] - us[0]
    why = next((c.withheld for side in sides for c in side if c.withheld), "")
    verdict, reason = ("withheld", why) if why else _verdict(delta, us[0], interval, weak)
    if why:
        parts = _table([])
    else:
        tables = [_mean([c.parts for c in side]) for side in sides]
        stacks = {t.has_stacks for side in sides for c in side for t in _ranks(c.opened)}
        if len(stacks) > 1:  # sites have other names with stacks than without: waits are told by their call alone
            tables = [_by_call(t) for t in tables]
        parts = _match(*tables)
    sentence = _sentence(us[0], delta, verdict, reason, parts, sides, why)
    return Diff(
        before_us=us[0], after_us=us[1], interval=interval, weak=weak, verdict=verdict, reason=reason, parts=parts, sentence=sentence, withheld=why,
    )  # fmt: skip


def _ranks(opened: Trace | TraceSet) -> list[Trace]:
    return list(opened.values()) if isinstance(opened, TraceSet) else [opened]


def _by_call(parts: pd.DataFrame) -> pd.DataFrame:
    """Parts with the waits of one call at all sites as one."""
    waits = (parts["kind"] == "wait").to_numpy()
    pooled = parts.copy()
    pooled.loc[waits, "site"] = "any site"
    return pooled.groupby(["kind", "name", "site"], sort=False)[["us", "count"]].sum().reset_index()


def _listed(x: Any) -> Sequence[Any]:
    if isinstance(x, (list, tuple)):
        if not x:
            raise LabError("a side of the comparison is an empty list; give a trace or several.")
        return x
    return [x]


@dataclass(frozen=True)
class _Capture:
    opened: Trace | TraceSet
    periods_us: np.ndarray
    step_us: float
    parts: pd.DataFrame
    lead_us: float
    copies: dict[tuple[str, str], float]
    waits: dict[tuple[str, str], float]
    withheld: str


def _capture(source: Any, comm_patterns: Mapping[str, str] | None) -> _Capture:
    opened = open_trace(source)
    every = lines(opened, comm_patterns)
    periods = pd.concat(
        [pd.Series(x.trace.steps()["period_us"].to_numpy(), index=x.trace.step_windows.labels) for x in every.values()], axis=1, keys=list(every)
    )  # fmt: skip
    whole = periods.dropna()
    late = whole.iloc[SKIPPED_STEPS:] if len(whole) > SKIPPED_STEPS else whole
    if not len(late):
        where = getattr(opened, "path", None)
        raise LabError(
            f"{where} has no steps with device events to compare; `dspark-lab trace summary` says what is missing."
        )
    slowest = late.idxmax(axis=1)
    values = late.max(axis=1).to_numpy()
    weights = _weights(values)
    broken = breakdown(opened, comm_patterns=comm_patterns)
    broken = broken[broken["step"].isin(late.index).to_numpy() & (broken["withheld"] != "").to_numpy()]
    withheld = _withheld(every, broken)
    sums = {r: _Sums(x) for r, x in every.items()} if not withheld else {}
    for step, rank, weight in zip(late.index, slowest, weights, strict=True) if sums else ():
        sums[rank].add(int(step), float(weight), 1.0 / len(late))
    parts = (
        pd.concat([x.table() for x in sums.values()] or [pd.DataFrame(columns=["kind", "name", "site", "us", "count"])])
        .groupby(["kind", "name", "site"], sort=False)[["us", "count"]]
        .sum()
        .reset_index()
    )
    first = next(iter(every.values())).trace
    steps = first.steps()
    n = max(len(late), 1)
    copies = first.memcpy()
    copies = copies[copies["step"].isin(late.index).to_numpy()]
    waits = first.waits()
    waits = waits[waits["step"].isin(late.index).to_numpy() & (waits["kind"] != "event_wait").to_numpy()]
    return _Capture(
        opened=opened,
        periods_us=values,
        step_us=float(np.median(values)),
        parts=parts,
        lead_us=float(steps[steps["step"].isin(late.index)]["launch_lead_us"].median()),
        copies=_per_step(copies["kind"], copies["bytes"], n),
        waits=_per_step(waits["name"], waits["site"], n),
        withheld=withheld,
    )


def _withheld(every: Mapping[int, DeviceLine], broken: pd.DataFrame) -> str:
    """Why the captures' causes cannot be told; "" where they can."""
    for line in every.values():
        integrity = line.trace.integrity
        if "step_us_p50" in integrity.withheld:
            return integrity.withheld["step_us_p50"]
    return f"step {broken['step'].iloc[0]}: {broken['withheld'].iloc[0]}" if len(broken) else ""


def _weights(values: np.ndarray) -> np.ndarray:
    """Weights of the steps, as equal as can be, with which their mean is their median: parts then sum to the median, and an outlier weighs little."""
    n = len(values)
    apart = values - values.mean()
    spread = float((apart**2).sum())
    even = np.full(n, 1.0 / n)
    return even if spread == 0 else even + apart * (float(np.median(values)) - float(values.mean())) / spread


class _Sums:
    """A rank's steps by cause, weighted and summed."""

    def __init__(self, line: DeviceLine) -> None:
        self.line, self.owed, self.waits = line, charge(line), line.trace.waits()
        self.place = {int(s): k for k, s in enumerate(line.trace.step_windows.labels)}
        self.ns, self.count = (np.zeros((3, len(line.names))) for _ in range(2))
        self.causes: dict[tuple[str, str, str], list[float]] = {}
        self.sites = list(zip(self.waits["name"].astype(str), self.waits["site"].astype(str), strict=True))

    def _put(self, kind: str, name: str, site: str, ns: float, count: float) -> None:
        if ns or count:
            was = self.causes.setdefault((kind, name, site), [0.0, 0.0])
            was[0] += ns
            was[1] += count

    def add(self, step: int, weight: float, share: float) -> None:
        """Add the period of one step: its time with ``weight``, what is counted with ``share``."""
        line, one = self.line, self.line.slices[self.place[step]]
        kind, code = line.kind[one.events], line.name[one.events]
        peer = np.where(kind == COMMUNICATION, np.minimum(line.peer_wait[one.events], one.own_ns), 0)
        np.add.at(self.ns, (kind, code), weight * (one.own_ns - peer))
        np.add.at(self.count, (kind, code), share)
        self._put(
            "peer_wait",
            "waiting for the slowest rank in collectives",
            "",
            weight * float(peer.sum()),
            share * float((peer > 0).sum()),
        )
        host, graph, other = line.gap_parts(one)
        late = {int(g): int(h) for g, h in zip(one.gaps[host > 0], host[host > 0], strict=True)}
        charged: dict[int, float] = {}
        if late:
            owed = self.owed
            a, b = np.searchsorted(owed.gap, min(late)), np.searchsorted(owed.gap, max(late), side="right")
            for g, w, ns in zip(owed.gap[a:b].tolist(), owed.wait[a:b].tolist(), owed.ns[a:b].tolist(), strict=True):
                if g in late:  # a gap that the step's window cuts pays in proportion
                    charged[w] = charged.get(w, 0.0) + ns * late[g] / float(line.host_ns[g])
        for w, ns in charged.items():
            name, site = self.sites[w] if w >= 0 else ("host work before launches", "")
            self._put("wait" if w >= 0 else "bubble", name, site, weight * ns, share)
        self._put(
            "launch",
            "launch latency and gaps between launches",
            "",
            weight * float(other.sum()),
            share * float((other > 0).sum()),
        )
        self._put(
            "graph_gap",
            "gaps between nodes of a graph",
            "",
            weight * float(graph.sum()),
            share * float((graph > 0).sum()),
        )

    def table(self) -> pd.DataFrame:
        """kind, name, site, us, count."""
        names = self.line.names
        rows = [
            (word, str(names[c]), "", float(self.ns[k, c]), float(self.count[k, c]))
            for k, word in enumerate(("kernel", "communication", "copy"))
            for c in np.flatnonzero(self.count[k]).tolist()
        ]
        rows += [(*key, ns, count) for key, (ns, count) in self.causes.items()]
        out = pd.DataFrame(rows, columns=["kind", "name", "site", "us", "count"])
        out["us"] /= 1000.0
        return out


def _per_step(a: pd.Series, b: pd.Series, num_steps: int) -> dict[tuple[str, str], float]:
    """How often a step each pair of values stands there."""
    counts: dict[tuple[str, str], float] = {}
    for key in zip(a.astype(str), b.astype(str), strict=True):
        counts[key] = counts.get(key, 0.0) + 1.0 / num_steps
    return counts


def _mean(tables: list[pd.DataFrame]) -> pd.DataFrame:
    every = pd.concat(tables)
    out = every.groupby(["kind", "name", "site"], sort=False)[["us", "count"]].sum().reset_index()
    out[["us", "count"]] /= len(tables)
    return out


# -- names --------------------------------------------------------------------------------------------------------


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


def _match(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
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


def _table(rows: Iterable[Any]) -> pd.DataFrame:
    text = ("kind", "name", "site", "matched")
    return pd.DataFrame(list(rows), columns=list(PART_COLUMNS)).astype(
        {c: object if c in text else float for c in PART_COLUMNS}
    )


# -- interval, verdict, words ----------------------------------------------------------------------------------------


def _interval(sides: list[list[_Capture]], medians: list[np.ndarray]) -> tuple[tuple[float, float], bool]:
    """95 % interval of the delta: over captures (Welch) where both sides have two or more, else over steps (bootstrap of medians)."""
    if all(len(m) >= 2 for m in medians):
        return _welch(*medians, about=float(medians[1].mean() - medians[0].mean())), False
    steps = [np.concatenate([c.periods_us for c in side]) for side in sides]
    if min(len(s) for s in steps) < 2:
        return (math.nan, math.nan), True
    if min(len(s) for s in steps) < _FEW_STEPS:
        return _welch(*steps, about=float(medians[1].mean() - medians[0].mean())), True
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(s, size=(_BOOTSTRAPS, len(s))), axis=1) for s in steps]
    low, high = np.percentile(drawn[1] - drawn[0], [2.5, 97.5])
    return (float(low), float(high)), True


def _welch(a: np.ndarray, b: np.ndarray, *, about: float) -> tuple[float, float]:
    """95 % interval of a difference of means, set around ``about``; Student's t at the degrees of freedom of the smaller side."""
    least = min(len(a), len(b))
    unit = np.arange(least, dtype=float)
    t = (t_interval(unit).high - unit.mean()) * math.sqrt(least) / float(np.std(unit, ddof=1))
    reach = t * math.sqrt(float(a.var(ddof=1)) / len(a) + float(b.var(ddof=1)) / len(b))
    return float(about - reach), float(about + reach)


def _verdict(delta: float, before: float, interval: tuple[float, float], weak: bool) -> tuple[str, str]:
    low, high = interval
    if math.isnan(low):
        return "tie", "too few steps for an interval"
    if low <= 0.0 <= high:
        return "tie", "the interval holds zero"
    if weak and abs(delta) < WEAK_FLOOR_PCT / 100 * before:
        return "tie", f"one capture a side, and captures of the same thing differ by up to {WEAK_FLOOR_PCT:g} %"
    how = "interval over steps of one capture a side: weak" if weak else "interval over captures"
    return ("slower" if delta > 0 else "faster"), how


def _sentence(
    before: float,
    delta: float,
    verdict: str,
    reason: str,
    parts: pd.DataFrame,
    sides: list[list[_Capture]],
    withheld: str,
) -> str:
    captures = "captures" if any(len(s) > 1 for s in sides) else "capture"
    head = (
        f"{delta:+.0f} µs of {before:.0f} a step in {'these' if captures == 'captures' else 'this'} profiled {captures}"
    )
    if withheld:
        return f"{head}; causes are withheld: {withheld}."
    if verdict == "tie":
        kinds = parts.groupby("kind")["delta_us"].sum()
        apart = kinds[(kinds.abs() >= max(2.0, 0.01 * before)).to_numpy()]
        cancel = (
            "; parts that cancel: " + ", ".join(f"{k} {v:+.0f} µs" for k, v in apart.items()) if len(apart) > 1 else ""
        )
        return f"Tie: {head}; {reason}{cancel}."
    least = max(2.0, 0.08 * abs(delta))
    big = parts[(parts["delta_us"].abs() >= least).to_numpy()]
    with_delta = big[(np.sign(big["delta_us"]) == np.sign(delta)).to_numpy()]
    against = big[(np.sign(big["delta_us"]) != np.sign(delta)).to_numpy()]
    said = [_phrase(r, sides) for r in with_delta.head(4).to_dict("records")]
    if len(against):
        said.append("against it " + ", ".join(_phrase(r, sides) for r in against.head(2).to_dict("records")))
    if not len(with_delta):
        kinds = parts.groupby("kind")["delta_us"].sum().sort_values(key=abs, ascending=False)
        said.insert(
            0, "many small parts, the most in " + ", ".join(f"{k} ({v:+.0f} µs)" for k, v in kinds.head(2).items())
        )
    leads = [float(np.mean([c.lead_us for c in side])) for side in sides]
    if not any(math.isnan(x) for x in leads) and abs(leads[1] - leads[0]) > 100:
        how = "fell" if leads[1] < leads[0] else "rose"
        said.append(f"launch lead {how} from {leads[0] / 1000:+.1f} to {leads[1] / 1000:+.1f} ms")
    text = "; ".join([*said, head])
    return text[:1].upper() + text[1:] + "."


def _phrase(part: dict[str, Any], sides: list[list[_Capture]]) -> str:
    us, kind, name = part["delta_us"], part["kind"], str(part["name"])
    if kind == "wait":
        more = part["after_us"] > part["before_us"]
        copy = _new_copy(sides if more else sides[::-1])
        site = str(part["site"])
        where = f", at {site}" if site else ""
        return ("" if more else "without ") + f"{copy}{_call(name, sides, site, more)} a step{where} ({us:+.0f} µs)"
    words = {
        "kernel": "kernel", "communication": "communication in", "copy": "copy", "peer_wait": "", "bubble": "the device waiting for", "launch": "", "graph_gap": "",
    }[kind]  # fmt: skip
    more = part["count_after"] - part["count_before"]
    times = f", {more:+.3g} a step" if kind in ("kernel", "communication", "copy") and abs(more) >= 0.5 else ""
    return f"{words} {_short(name)} ({us:+.0f} µs{times})".strip()


def _call(name: str, sides: list[list[_Capture]], site: str, more: bool) -> str:
    side = sides[1 if more else 0]
    count = round(float(np.mean([c.waits.get((name, site), 1.0) for c in side])))
    kinds = {"StreamSynchronize": "stream synchronise", "DeviceSynchronize": "device synchronise", "EventSynchronize": "event wait", "Memcpy": "blocking copy"}  # fmt: skip
    word = next((w for k, w in kinds.items() if k in name), name)
    return f"{'a' if count <= 1 else count} {word}{'' if count <= 1 else 's'} ({name})"


def _new_copy(sides: list[list[_Capture]]) -> str:
    """The copies that one side has more of a step, as words with "and" behind; "" where none."""

    def mean(side: list[_Capture]) -> dict[tuple[str, str], float]:
        keys = {k for c in side for k in c.copies}
        return {k: float(np.mean([c.copies.get(k, 0.0) for c in side])) for k in keys}

    less, more = (mean(s) for s in sides)
    added = {
        k: v - less.get(k, 0.0)
        for k, v in more.items()
        if v - less.get(k, 0.0) > 0.5 and ("HtoD" in k[0] or "DtoH" in k[0])
    }
    if not added:
        return ""
    (kind, size), count = max(added.items(), key=lambda kv: ("Pageable" in kv[0][0], kv[1]))
    word = "pageable " if "Pageable" in kind else ""
    number = "one" if round(count) == 1 else str(round(count))
    way = "host-to-device" if "HtoD" in kind else "device-to-host"
    return f"{number} {word}{size}-byte {way} copy{'' if number == 'one' else ' each'} and "


def _short(name: str, most: int = 70) -> str:
    text = re.sub(r"^void ", "", name)
    return text if len(text) <= most else text[: most - 1] + "…"
