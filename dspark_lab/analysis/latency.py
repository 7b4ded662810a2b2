"""`compare`: arms against a baseline, each with an interval and a verdict, never a bare difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from dspark_lab.analysis.intervals import Interval, paired_delta, step_interval
from dspark_lab.config import ALLOCS
from dspark_lab.errors import LabError, unknown
from dspark_lab.runs.plan import is_floor, path_key, pick_baseline
from dspark_lab.runs.record import NO_MEDIAN, Run, as_runs

COLUMNS = ("same_path_as", "reason", "ep_size", "tp_size", "batch_size", "mask_padding", "source", "device", "device_name", "profiled",
           "step_ms_p50", "step_ms_ci95", "delta_pct", "delta_pct_ci95", "floor_pct", "verdict", "accept_simulated", "accept_length", "tokens_per_s",
           "num_blocks", "status", "name",
    "baseline", "label")  # fmt: skip
NO_DEVICE = "no GPU: there is no copy and no stream here, so strategies have nothing to differ by"


def compare(runs: Sequence[Run], *, by: str = "alloc", baseline: Any = None) -> pd.DataFrame:
    """A row a run: median step, interval, delta to the baseline arm with interval, verdict.

    ``by`` is the toggle that tells the arms apart; runs are compared within equal values of all others. ``baseline`` is a
    value of it (default: the floor arm where present, else ``none``, else the first). Steps are unprofiled, from the third of
    a block on, the maximum over ranks. The verdict is ``slower`` or ``faster`` only where the paired interval excludes zero
    and the delta is beyond the A/A floor. Raises `LabError` for an empty list or a baseline that is not there.
    """
    if isinstance(runs, Run) or not isinstance(runs, Iterable):
        raise LabError(f"compare takes a list of runs, not {type(runs).__name__}; lab.sweep(...) gives one.")
    runs = as_runs(runs)
    arms = [r for r in runs if r.role == "arm"]
    if not arms:
        raise LabError("there are no runs to compare; lab.sweep(...) or lab.load_run(...) gives some.")
    arms[0].config.toggle(by)  # an unknown name is refused here
    rows = []
    for members in _comparable(arms, by):
        base = _baseline(members, by, baseline)
        pairs = [r for r in runs if r.role == "aa" and r.config == base.config]
        floor = _floor(base, pairs)
        ordered = sorted(members, key=lambda r: (r is not base, _rank(r.config.toggle(by))))
        rows += [_row(run, base, floor, by) for run in ordered]
    table = pd.DataFrame(rows, columns=[by, *(c for c in COLUMNS if c != by)])
    table["same_path_as"] = table["same_path_as"].astype(object).where(table["same_path_as"].notna(), None)
    table.attrs["by"] = by
    return table


def _rank(value: Any) -> int:
    """Allocation strategies in the order of their history; other values as they came."""
    return list(ALLOCS).index(value) if value in ALLOCS else len(ALLOCS)


def _comparable(arms: list[Run], by: str) -> list[list[Run]]:
    """Runs with equal toggles but ``by`` (the mask goes with `alloc`), on one device, of one source."""
    free = {by, "mask_padding", "max_new_tokens"} if by in ("alloc", "transfer", "guard") else {by}
    if by in ("transfer", "guard"):
        free.add("alloc")
    groups: dict[Any, list[Run]] = {}
    for run in arms:
        flat = run.config.to_dict()
        key = (run.shown_source, run.device_name, *(str(v) for k, v in sorted(flat.items()) if k not in free))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _baseline(members: list[Run], by: str, wanted: Any) -> Run:
    if wanted is None:
        config = pick_baseline([r.config for r in members])
        return next(r for r in members if r.config == config)
    for run in members:
        if run.config.toggle(by) == wanted:
            return run
    raise unknown("baseline", wanted, dict.fromkeys(r.config.toggle(by) for r in members))


def _floor(base: Run, pairs: list[Run]) -> float:
    """Percent: how far the baseline differs from itself, at most, within its 95 % interval; NaN where it was not measured twice."""
    if pairs:
        again = paired_delta(pairs[0], base)
        return again.reach if again.known else math.nan
    return float(base.quoted.get("floor_pct", math.nan))


def _row(run: Run, base: Run, floor: float, by: str) -> dict[str, Any]:
    step = step_interval(run)
    verdict, reason, delta = _verdict(run, base, floor, by)
    e = run.config.engine
    return {
        by: run.config.toggle(by),
        "same_path_as": run.same_path_as,
        "reason": reason,
        "ep_size": run.config.parallel.ep_size,
        "tp_size": run.config.parallel.tp_size,
        "batch_size": e.batch_size,
        "mask_padding": e.mask_padding,
        "source": run.shown_source,
        "device": run.device,
        "device_name": run.device_name,
        "profiled": False,
        "step_ms_p50": run.step_ms_p50,
        "step_ms_ci95": [step.low, step.high] if step.known else None,
        "delta_pct": delta.mean,
        "delta_pct_ci95": [delta.low, delta.high] if delta.known else None,
        "floor_pct": floor,
        "verdict": verdict,
        "accept_simulated": run.acceptance_is_simulated,
        "accept_length": run.acceptance.accept_length if run.acceptance else math.nan,
        "tokens_per_s": run.tokens_per_s,
        "num_blocks": step.n,
        "status": run.status,
        "name": run.name,
        "baseline": base.name,
        "label": run.label,
    }


def _verdict(run: Run, base: Run, floor: float, by: str) -> tuple[str, str, Interval]:
    zero = Interval(0.0, 0.0, 0.0, 2)
    if run is base:
        return "baseline", "the floor: mask off, nothing built" if is_floor(run.config) else "", zero
    if path_key(run.config) == path_key(base.config):
        return "tie", f"the same code path as {base.config.engine.alloc}: nothing to compare", zero
    quoted = not len(run.step_us()) or not len(base.step_us())
    delta = paired_delta(run, base) if not quoted else _quoted_delta(run, base)
    if run.has_no_median or base.has_no_median:
        return "tie", NO_MEDIAN, delta
    if run.device == "cpu" and by in ("alloc", "transfer", "guard"):
        return "tie", NO_DEVICE, delta
    if quoted:
        return *_quoted_verdict(delta.mean, floor), delta
    if not delta.known:
        return "tie", "one block only, so no interval; measure at least 2 repeats or processes", delta
    if math.isnan(floor) and not _one_group(run, base) and run.steps["process"].nunique() < 3:
        return (
            "tie",
            "arms in process groups of their own, fewer than 3 times each: no A/A floor; measure processes=3",
            delta,
        )
    if delta.low <= 0.0 <= delta.high:
        return "tie", "the interval holds zero", delta
    if not math.isnan(floor) and abs(delta.mean) <= floor:
        return "tie", f"inside the A/A floor of {floor:.2f} %", delta
    return "slower" if delta.mean > 0 else "faster", _strength(run), delta


def _one_group(run: Run, base: Run) -> bool:
    """Whether both ran in one process group, block by block in turn."""
    return (run.config.model, run.config.parallel) == (base.config.model, base.config.parallel)


def _quoted_delta(run: Run, base: Run) -> Interval:
    return Interval(100.0 * (run.step_ms_p50 / base.step_ms_p50 - 1.0), math.nan, math.nan, 1)


def _quoted_verdict(delta: float, floor: float) -> tuple[str, str]:
    how = "medians as quoted, without an interval"
    if math.isnan(delta):
        return "tie", "no unprofiled steps to compare"
    if math.isnan(floor) or abs(delta) <= floor:
        return "tie", f"{how}; differences under {floor:g} % are not established"
    return "slower" if delta > 0 else "faster", how


def _strength(run: Run) -> str:
    processes = run.steps["process"].nunique()
    return (
        f"interval over {processes} processes"
        if processes > 1
        else "interval over blocks of one process: weaker than over processes"
    )
