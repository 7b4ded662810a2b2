"""Why is it slower: two traces, or two sets of captures, the delta of their steps and the causes that sum to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.captures import Capture, read_capture
from dspark_lab.analysis.diff_words import sentence
from dspark_lab.analysis.intervals import t_interval
from dspark_lab.analysis.matching import match_parts, mean_parts, table_of
from dspark_lab.errors import LabError
from dspark_lab.trace import Trace, TraceSet

#: With one capture a side the interval knows nothing of how captures differ: a smaller delta is a tie.
WEAK_FLOOR_PCT = 1.0
_BOOTSTRAPS = 4000
#: Below this many steps a side a bootstrap is too narrow; Student's t over them instead.
_FEW_STEPS = 6
#: Steps of two single captures are taken in pairs from this many on, where their periods correlate so.
_FEWEST_PAIRS, _SAME_WORK = 5, 0.9


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
    sides = [[read_capture(s, comm_patterns) for s in _listed(x)] for x in (before, after)]
    _same_steps(sides)
    medians = [np.array([c.step_us for c in side]) for side in sides]
    us = [float(m.mean()) for m in medians]
    interval, basis = _interval(sides, medians)
    weak = basis != "captures"
    delta = us[1] - us[0]
    why = next((c.withheld for side in sides for c in side if c.withheld), "")
    verdict, reason = ("withheld", why) if why else _verdict(delta, us[0], interval, basis)
    if why:
        parts = table_of([])
    else:
        tables = [mean_parts([c.parts for c in side]) for side in sides]
        stacks = {t.has_stacks for side in sides for c in side for t in _ranks(c.opened)}
        if len(stacks) > 1:  # sites have other names with stacks than without: waits are told by their call alone
            tables = [_by_call(t) for t in tables]
        parts = match_parts(*tables)
    said = sentence(us[0], delta, verdict, reason, parts, sides, why)
    return Diff(
        before_us=us[0], after_us=us[1], interval=interval, weak=weak, verdict=verdict, reason=reason, parts=parts, sentence=said, withheld=why,
    )  # fmt: skip


def _same_steps(sides: list[list[Capture]]) -> None:
    """Raises `LabError` where steps of one side would stand against the whole of a trace on the other."""
    found = [{t.step_windows.found for c in side for t in _ranks(c.opened)} for side in sides]
    if found[0] != found[1]:
        bare = next(c.opened for side in sides for c in side if not all(t.step_windows.found for t in _ranks(c.opened)))
        raise LabError(
            f"{getattr(bare, 'path', None) or 'one side'} has no step annotation, so the whole of it would stand against single steps "
            "of the other side; name its steps with step_pattern=."
        )


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


def _interval(sides: list[list[Capture]], medians: list[np.ndarray]) -> tuple[tuple[float, float], str]:
    """95 % interval of the delta, and what it is over.

    Over captures (Welch) where both sides have two or more. Else over steps: in pairs where step i of both sides did the
    same work, as its periods tell (`_in_step`); bootstrap of medians else.
    """
    if all(len(m) >= 2 for m in medians):
        return _welch(*medians, about=float(medians[1].mean() - medians[0].mean())), "captures"
    if _in_step(sides):
        pairs = t_interval(sides[1][0].periods_us - sides[0][0].periods_us)
        return (pairs.low, pairs.high), "paired steps"
    steps = [np.concatenate([c.periods_us for c in side]) for side in sides]
    if min(len(s) for s in steps) < 2:
        return (math.nan, math.nan), "steps"
    if min(len(s) for s in steps) < _FEW_STEPS:
        return _welch(*steps, about=float(medians[1].mean() - medians[0].mean())), "steps"
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(s, size=(_BOOTSTRAPS, len(s))), axis=1) for s in steps]
    low, high = np.percentile(drawn[1] - drawn[0], [2.5, 97.5])
    return (float(low), float(high)), "steps"


def _in_step(sides: list[list[Capture]]) -> bool:
    """Whether two single captures go up and down together: the same requests, so the same experts and lengths in each step."""
    a, b = sides[0][0].periods_us, sides[1][0].periods_us
    if max(map(len, sides)) > 1 or len(a) != len(b) or len(a) < _FEWEST_PAIRS or min(a.std(), b.std()) == 0:
        return False
    return float(np.corrcoef(a, b)[0, 1]) >= _SAME_WORK


def _welch(a: np.ndarray, b: np.ndarray, *, about: float) -> tuple[float, float]:
    """95 % interval of a difference of means, set around ``about``; Student's t at the degrees of freedom of the smaller side."""
    least = min(len(a), len(b))
    unit = np.arange(least, dtype=float)
    t = (t_interval(unit).high - unit.mean()) * math.sqrt(least) / float(np.std(unit, ddof=1))
    reach = t * math.sqrt(float(a.var(ddof=1)) / len(a) + float(b.var(ddof=1)) / len(b))
    return float(about - reach), float(about + reach)


def _verdict(delta: float, before: float, interval: tuple[float, float], basis: str) -> tuple[str, str]:
    low, high = interval
    if math.isnan(low):
        return "tie", "too few steps for an interval"
    if low <= 0.0 <= high:
        return "tie", "the interval holds zero"
    weak = basis != "captures"
    if weak and abs(delta) < WEAK_FLOOR_PCT / 100 * before:
        return "tie", f"one capture a side, and captures of the same thing differ by up to {WEAK_FLOOR_PCT:g} %"
    how = f"interval over {basis} of one capture a side: weak" if weak else "interval over captures"
    return ("slower" if delta > 0 else "faster"), how
