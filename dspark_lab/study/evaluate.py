"""`evaluate`: what drafters accept, over kinds of text, temperatures, block sizes and thresholds; every figure over prompts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.acceptance import loop_share
from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.config.shipped import DRAFTERS, TEXT_KINDS
from dspark_lab.device import device_name, resolve
from dspark_lab.engine.generate import Generated, generate
from dspark_lab.engine.request import check_limit, check_prompt, check_prompts
from dspark_lab.errors import LabError
from dspark_lab.models.shipped import shipped
from dspark_lab.models.text import held_out
from dspark_lab.models.weights import build
from dspark_lab.runs.record import Acceptance
from dspark_lab.study.evaluation import ROW_COLUMNS, Evaluation


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of what is varied."""

    drafter: str
    kind: str
    temperature: float
    block_size: int
    threshold: float


def evaluate(
    drafters: str | Sequence[str] | Mapping[str, LabConfig] = (DRAFTERS[0],),
    *,
    kinds: Sequence[str] | Mapping[str, list[list[int]]] = TEXT_KINDS,
    temperatures: Sequence[float] = (0.0,),
    block_sizes: Sequence[int] | None = None,
    thresholds: Sequence[float] = (0.0,),
    num_prompts: int = 8,
    max_new_tokens: int = 96,
    batch_size: int = 8,
    device: str = "auto",
    seed: int = 0,
    keep_rounds: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Generates ``max_new_tokens`` behind ``num_prompts`` prompts of each kind for every combination, and counts rounds.

    ``drafters``: names of shipped ones, or a config by a name of its own (`lab.load_pair`). ``kinds``: of the shipped held-out
    text, or prompts by a name (`lab.read_turns`). ``block_sizes``: γ, at most a drafter's own, which None takes. ``thresholds``:
    of ``verify="threshold"``; 0 verifies whole blocks. ``keep_rounds`` keeps confidences for `Evaluation.confidence_rounds`.
    ``on_progress(done, all)`` after each batch; where ``should_stop()`` says so, and on an interrupt, what is there is returned.

    accept_length = 1 + Σ_k P_k is asserted for every prompt. Times are those of this loop as it runs, prefill within: no
    benchmark. Raises `LabError` before anything runs for what cannot be.
    """
    configs, texts = _configs(drafters, device, batch_size, seed), _texts(kinds, num_prompts)
    for name, values in (("temperatures", temperatures), ("block_sizes", block_sizes), ("thresholds", thresholds)):
        if (values is None and name != "block_sizes") or (values is not None and not _several(values)):
            raise LabError(f"{name}={shown(values)} is not a list of one value or more, such as [{_EXAMPLES[name]}].")
    for prompts in texts.values():
        for prompt, cfg in itertools.product(prompts, configs.values()):
            check_prompt(prompt, cfg, max_new_tokens=check_limit(max_new_tokens))
    cells = [
        Cell(drafter=d, kind=k, temperature=t, block_size=g, threshold=c)
        for d, cfg in configs.items()
        for t, g, c in itertools.product(temperatures, block_sizes or (cfg.model.drafter.block_size,), thresholds)
        for k in texts
    ]
    plan = [(cell, _config_of(configs[cell.drafter], cell, max_new_tokens)) for cell in cells]
    rows: list[dict[str, Any]] = []
    stopped = False
    total, done = sum(-(-len(texts[c.kind]) // batch_size) for c in cells), 0
    try:
        for found in _measured(plan, texts, max_new_tokens, batch_size, keep_rounds):
            rows += found
            done += 1
            if on_progress is not None:
                on_progress(done, total)
            if stopped := done < total and should_stop is not None and should_stop():
                break
    except KeyboardInterrupt:
        stopped = True
    return Evaluation(
        rows=pd.DataFrame(rows, columns=list(ROW_COLUMNS)),
        device_name=device_name(resolve(device)),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        complete=not stopped,
    )


def _measured(
    plan: list[tuple[Cell, LabConfig]],
    texts: Mapping[str, list[list[int]]],
    max_new_tokens: int,
    batch_size: int,
    keep_rounds: bool,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one batch of prompts after the other; models are built once for cells that share them."""
    models, built = None, None
    for cell, cfg in plan:
        if built != cfg.model:
            models, built = build(cfg, resolve(cfg.engine.device)), cfg.model
        prompts = texts[cell.kind]
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            now = cfg.replace(seed=cfg.seed + first)  # what a prompt draws goes by its place in the batch
            started = time.perf_counter()
            made = generate(now, batch, max_new_tokens=max_new_tokens, keep_rounds=keep_rounds, models=models)
            seconds = time.perf_counter() - started
            yield [_row(cell, first + i, batch[i], g, seconds / len(batch), max(map(_rounds, made))) for i, g in enumerate(made)]  # fmt: skip


def _rounds(g: Generated) -> int:
    return len(g.acceptance_lengths)


def _row(cell: Cell, index: int, prompt: list[int], g: Generated, seconds: float, steps: int) -> dict[str, Any]:
    counted = Acceptance.of_rounds(g.acceptance_lengths, g.proposal_lengths, block_size=cell.block_size)
    new = g.tokens[len(prompt) :]
    confidence = [r.confidence for r in g.rounds] if g.rounds and g.rounds[0].confidence is not None else None
    return vars(cell) | {
        "prompt": index,
        "num_rounds": counted.num_rounds,
        "num_tokens": sum(g.acceptance_lengths),
        "accepted": list(counted.accepted),
        "num_verified": sum(g.proposal_lengths),
        "seconds": seconds,
        "num_steps": steps,
        "loop_share": loop_share(new),
        "ended": g.ended,
        "tokens": new,
        "lengths": list(g.acceptance_lengths),
        "confidence": confidence,
    }


_EXAMPLES = {"temperatures": "0.0, 0.7", "block_sizes": "3, 7", "thresholds": "0.0, 0.5"}


# -- what was asked for ------------------------------------------------------------------------------------------------


def _configs(drafters: Any, device: str, batch_size: int, seed: int) -> dict[str, LabConfig]:
    if isinstance(drafters, str):
        drafters = (drafters,)
    if not isinstance(drafters, Mapping):
        if not isinstance(drafters, Sequence):
            raise LabError(
                f"drafters={shown(drafters)} is no list of names, and no configs by a name such as {{'mine': cfg}}."
            )
        drafters = {name: shipped(name) for name in drafters}
    if not drafters:
        raise LabError(f"there is no drafter to evaluate; give names of {', '.join(DRAFTERS)}, or configs by a name.")
    for name, cfg in drafters.items():
        if not isinstance(cfg, LabConfig):
            raise LabError(
                f"drafters[{name!r}]={shown(cfg)} is no LabConfig; lab.load_pair(target, drafter) makes one."
            )
        if cfg.engine.simulated_accept_length is not None:
            raise LabError(f"drafters[{name!r}] has a simulated_accept_length, which is no acceptance; choose None.")
    return {n: c.replace(device=device, batch_size=batch_size, seed=seed, speculate=True) for n, c in drafters.items()}


def _several(values: Any) -> bool:
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) and len(values) > 0


def _texts(kinds: Any, num_prompts: int) -> dict[str, list[list[int]]]:
    if not is_int(num_prompts) or num_prompts < 1:
        raise LabError(f"num_prompts={shown(num_prompts)} is not a whole number of at least 1.")
    if isinstance(kinds, str):
        kinds = (kinds,)
    if not isinstance(kinds, Sequence | Mapping):
        raise LabError(f"kinds={shown(kinds)} is no list of {', '.join(TEXT_KINDS)}, and no prompts by a name.")
    if isinstance(kinds, Mapping):
        for prompts in kinds.values():
            check_prompts(prompts)
    texts = dict(kinds) if isinstance(kinds, Mapping) else {k: held_out(k) for k in kinds}
    if not texts or not all(texts.values()):
        raise LabError(f"there are no prompts in kinds={shown(kinds)}; give some of {', '.join(TEXT_KINDS)}.")
    return {kind: prompts[:num_prompts] for kind, prompts in texts.items()}


def _config_of(cfg: LabConfig, cell: Cell, max_new_tokens: int) -> LabConfig:
    """``cfg`` as ``cell`` runs it. Raises `LabError` for a γ over the drafter's own: its checkpoint has no such rows."""
    if is_int(cell.block_size) and cell.block_size > cfg.model.drafter.block_size:
        raise LabError(
            f"block_size={cell.block_size} is over that of {cell.drafter!r}, {cfg.model.drafter.block_size}; choose at most that."
        )
    return cfg.replace(
        temperature=cell.temperature,
        block_size=cell.block_size,
        verify="threshold" if cell.threshold else "static",
        confidence_threshold=cell.threshold,
        max_new_tokens=max_new_tokens,
        prompt_len=1,  # of made prompts, which there are none of here
    )
