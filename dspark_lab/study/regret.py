"""`schedule_regret`: the deployed scheduler against the best fixed length of each load, rehearsed on real texts and measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from dspark_lab.analysis.intervals import t_interval
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.errors import LabError
from dspark_lab.plan.costs import Costs
from dspark_lab.plan.rehearsal import Earned, TextPath, check_scales, check_texts, deployed, fixed, rehearse, stopping

SEEDS = 8


def schedule_regret(
    texts: Sequence[TextPath],
    costs: Costs,
    *,
    requests: Sequence[int],
    num_steps: int = 400,
    num_seeds: int = SEEDS,
    scales: np.ndarray | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """A row a load: tokens a second of the scheduler over the best fixed length in hindsight, over whole blocks, and over no
    drafts, each with an interval over ``num_seeds`` rehearsals that share texts and luck.

    ``scales`` [γ]: temperatures of an STS table. Columns: ``num_requests``, ``best_length``, ``regret_pct`` and its interval
    (positive: the scheduler is slower), ``over_whole_pct``, ``over_none_pct``, ``early_stop_regret_pct``, ``verify_len``,
    ``accept_length``. Simulated from measured parts. Raises `LabError` for a load that is none.
    """
    if not isinstance(requests, Sequence | np.ndarray) or isinstance(requests, str) or not len(requests):
        raise LabError(f"requests={shown(requests)} is not a list of one load or more, such as [1, 16].")
    for value in requests:
        if not is_int(value) or value < 1:
            raise LabError(f"requests holds {shown(value)}; loads are whole numbers of at least 1.")
    if not is_int(num_seeds) or num_seeds < 2:
        raise LabError(f"num_seeds={shown(num_seeds)} is not a whole number of at least 2, which an interval needs.")
    if not is_int(num_steps) or num_steps < 1:
        raise LabError(f"num_steps={shown(num_steps)} is not a whole number of at least 1.")
    if not hasattr(costs, "seconds_at"):
        raise LabError(
            f"costs={shown(costs)} is no table of costs; an SPS profile gives one: lab.load_sps(path).additive()."
        )
    if not texts:
        raise LabError("there are no texts to rehearse on; train.paths.text_paths makes them of what a target wrote.")
    check_texts(texts)
    if scales is not None:
        scales = check_scales(scales, texts[0].survival.shape[1])
    rows = []
    for i, load in enumerate(requests):
        rows.append(_row(texts, costs, load, num_steps, num_seeds, scales))
        if on_progress is not None:
            on_progress(i + 1, len(requests))
    return pd.DataFrame(rows)


def _row(
    texts: Sequence[TextPath], costs: Costs, load: int, num_steps: int, num_seeds: int, scales: np.ndarray | None
) -> dict[str, float]:
    gamma = texts[0].survival.shape[1]

    def speeds(rule_of: Callable[[], Callable[..., np.ndarray]]) -> list[Earned]:
        return [
            rehearse(texts, costs, rule_of(), num_requests=load, num_steps=num_steps, seed=s, scales=scales)
            for s in range(num_seeds)
        ]

    whole = {n: speeds(lambda n=n: fixed(n)) for n in range(gamma + 1)}
    best = max(whole, key=lambda n: np.mean([e.tokens_per_s for e in whole[n]]))
    ours = speeds(lambda: deployed(costs, block_size=gamma, max_requests=load))
    early = speeds(lambda: stopping(costs))
    regret = _over(whole[best], ours)
    return {
        "num_requests": load,
        "best_length": best,
        "regret_pct": regret[0],
        "regret_low_pct": regret[1],
        "regret_high_pct": regret[2],
        "over_whole_pct": _over(ours, whole[gamma])[0],
        "over_none_pct": _over(ours, whole[0])[0],
        "early_stop_regret_pct": _over(whole[best], early)[0],
        "verify_len": float(np.mean([e.verify_len for e in ours])),
        "accept_length": float(np.mean([e.accept_length for e in ours])),
    }


def _over(one: Sequence[Earned], other: Sequence[Earned]) -> tuple[float, float, float]:
    """By how many per cent ``one`` is faster than ``other``, in pairs: mean and its 95 % interval."""
    logs = np.log([a.tokens_per_s / b.tokens_per_s for a, b in zip(one, other, strict=True)])
    spread = t_interval(logs)
    mean, low, high = (100 * float(np.expm1(x)) for x in (spread.mean, spread.low, spread.high))
    return mean, low, high
