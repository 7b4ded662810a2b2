"""Is speculation worth it: runs with drafts beside the same engine without, and the accept length at which they break even."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.intervals import Interval, block_medians, replicates, t_interval
from dspark_lab.errors import LabError
from dspark_lab.runs.record import Run, as_runs

COLUMNS = ("name", "batch_size", "plain_ms", "round_ms", "accept_length", "break_even", "tokens_per_s", "plain_tokens_per_s",
           "speedup", "speedup_low", "speedup_high", "expected", "off_pct", "label")  # fmt: skip


def speculation(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each run with drafts that has its twin without (``speculate=False``, all else alike) among ``runs``.

    ``plain_ms`` and ``round_ms``: median step without and with drafts. ``break_even``: the accept length (tokens a round, bonus
    included) at which both are equally fast, ``round_ms / plain_ms``. ``speedup``: tokens over time, all steps of a block added
    up, with over without; its 95 % interval is over processes, of log ratios. ``expected``: accept_length · plain_ms /
    round_ms, and ``off_pct`` what the speed-up is from that. Raises `LabError` where no run has its twin.
    """
    runs = as_runs(runs)
    drafting = [r for r in runs if r.role == "arm" and r.config.engine.speculate]
    plain = [r for r in runs if r.role == "arm" and not r.config.engine.speculate]
    twins = ((run, _twin(run, plain)) for run in drafting)
    rows = [_row(run, twin) for run, twin in twins if twin is not None]
    if not rows:
        raise LabError(
            f"among {len(runs)} runs there is none with drafts beside one without (speculate=False) that is alike in all else; "
            "measure both with lab.sweep(cfg, speculate=[True, False])."
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _twin(run: Run, plain: list[Run]) -> Run | None:
    """The run without drafts that is alike: of the same `alloc` where several strategies were measured, which it does not read."""
    alike = [p for p in plain if _alike(run, p)]
    return next((p for p in alike if p.config.engine.alloc == run.config.engine.alloc), alike[0] if alike else None)


def _alike(run: Run, plain: Run) -> bool:
    return run.config.replace(speculate=False, alloc="on_demand") == plain.config.replace(alloc="on_demand")


def _row(run: Run, plain: Run) -> dict[str, Any]:
    if run.acceptance is None:
        raise LabError(f"{run.name} holds no accept lengths; measure it with lab.sweep, which counts them.")
    gained = _speedup(run, plain)
    round_ms, plain_ms = (float(block_medians(r).median()) / 1e3 for r in (run, plain))
    expected = run.acceptance.accept_length * plain_ms / round_ms
    return {
        "name": run.name,
        "batch_size": run.config.engine.batch_size,
        "plain_ms": plain_ms,
        "round_ms": round_ms,
        "accept_length": run.acceptance.accept_length,
        "break_even": round_ms / plain_ms,
        "tokens_per_s": float(_tokens_per_s(run).mean()),
        "plain_tokens_per_s": float(_tokens_per_s(plain).mean()),
        "speedup": gained.mean,
        "speedup_low": gained.low,
        "speedup_high": gained.high,
        "expected": expected,
        "off_pct": 100 * (gained.mean / expected - 1),
        "label": run.label,
    }


def _tokens_per_s(run: Run) -> pd.Series:
    """Committed tokens over the time of all steps, of each (process, repeat)."""
    blocks = run.step_us().groupby(["process", "repeat"])
    return 1e6 * blocks["num_committed"].sum() / blocks["step_us"].sum()


def _speedup(run: Run, plain: Run) -> Interval:
    both = pd.concat([_tokens_per_s(run), _tokens_per_s(plain)], axis=1, keys=["a", "b"]).dropna()
    logs = t_interval(replicates(np.log(both["a"] / both["b"])).to_numpy())
    mean, low, high = (float(np.exp(x)) for x in (logs.mean, logs.low, logs.high))
    return Interval(mean, low, high, logs.n)
