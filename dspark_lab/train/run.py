"""`train_drafter`: the verb. A target's folder and token sequences in, a drafter's folder out."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from dspark_lab.config.parts import ModelConfig
from dspark_lab.device import device_name, resolve
from dspark_lab.errors import LabError, unknown
from dspark_lab.models.checkpoint import context_len_of, load_weights
from dspark_lab.models.config_json import decoder_config, read_config
from dspark_lab.models.decoder import Target
from dspark_lab.models.save import save_drafter
from dspark_lab.spec.loss import LossWeights
from dspark_lab.train.data import TokenData, token_data
from dspark_lab.train.drafting import DrafterTask
from dspark_lab.train.scalars import ScalarLog
from dspark_lab.train.shapes import drafter_model, new_drafter
from dspark_lab.train.states import Cached, OnTheFly, TargetStates
from dspark_lab.train.trainer import Progress, Recipe, Trainer

STATES = ("on_the_fly", "cached")
STATE_FILE = "training.pt"


@dataclass(frozen=True, kw_only=True)
class TrainedDrafter:
    """What a training left."""

    folder: Path
    """A drafter's checkpoint: `lab.load_pair(target, folder)`."""
    model: ModelConfig
    recipe: Recipe
    history: pd.DataFrame
    """A row a logged step: step, lr, total, ce, l1, confidence, accept_length (expected, T=1), grad_norm, elapsed_s."""
    seconds: float
    """Of this call; a resumed run took longer in all."""
    device: str
    complete: bool = True
    """False: it was told to stop. ``folder`` then holds the drafter as it stood, and the same call goes on from there."""

    @property
    def accept_length(self) -> float:
        """Expected tokens a round on the last training batches, at temperature 1: the mean of the last tenth of the log; NaN where nothing was logged."""
        if not len(self.history):
            return float("nan")
        tail = self.history["accept_length"].tail(max(1, len(self.history) // 10))
        return float(tail.mean())


def train_drafter(
    target: str | Path,
    data: TokenData | Sequence[Sequence[int]],
    *,
    out: str | Path,
    mask_token_id: int,
    seq_len: int = 256,
    device: str = "auto",
    states: str = "on_the_fly",
    graph: bool | None = None,
    progress: Callable[[Progress], None] | None = None,
    logdir: str | Path | None = None,
    log_every: int = 50,
    save_every: int = 500,
    should_stop: Callable[[], bool] | None = None,
    **options: Any,
) -> TrainedDrafter:
    """Trains a drafter for the checkpoint folder ``target`` and writes it to ``out``; an interrupted call goes on when repeated.

    ``data``: token sequences (cut to ``seq_len``), or a `TokenData`. ``options``: fields of `Recipe` (``num_steps``,
    ``peak_lr``, ``seed``, …) and of `drafter_model` (``drafter``, ``markov_head``, ``num_layers``, ``block_size``, …). ``graph``:
    whether a step is one CUDA graph; by default on a GPU. ``progress`` is called every ``log_every`` steps, ``logdir`` takes
    TensorBoard scalars. ``should_stop`` is asked after every step; where it says so, the state is saved and the result is not
    ``complete``. bfloat16 with float32 masters on a GPU, float32 on a CPU. Raises `LabError` on unknown options, on token ids
    outside the vocabulary, and where ``out`` holds the state of another run.
    """
    started, out, where = time.perf_counter(), Path(out), resolve(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    frozen, context_len = load_target(target, where, dtype)
    recipe, shape = _sorted_options(options)
    model = drafter_model(frozen.cfg, mask_token_id=mask_token_id, context_len=context_len, **shape)
    data = data if isinstance(data, TokenData) else token_data(data, seq_len)
    _check_tokens(data, model)
    drafter = new_drafter(model, frozen, recipe.seed, device=where, dtype=dtype)
    task = DrafterTask(frozen, drafter, data, recipe, _states(states, frozen, model, data, where))
    trainer = Trainer(task, recipe, graph=where.type == "cuda" if graph is None else graph)
    state = out / STATE_FILE
    if state.is_file():
        trainer.load(state)
    with ScalarLog(logdir) as log:
        trainer.run(
            log_every=log_every, progress=log.both(progress), state_path=state, save_every=save_every,
            should_stop=should_stop,
        )  # fmt: skip
    save_drafter(
        drafter, model, out, dtype=torch.bfloat16 if where.type == "cuda" else dtype, num_anchors=recipe.num_anchors
    )
    return TrainedDrafter(
        folder=out,
        model=model,
        recipe=recipe,
        history=history_of(trainer),
        seconds=time.perf_counter() - started,
        device=device_name(where),
        complete=not trainer.stopped,
    )


def load_target(folder: str | Path, device: torch.device, dtype: torch.dtype) -> tuple[Target, int]:
    """A frozen target from its checkpoint folder, on one rank, and the length of context it was made for."""
    config = read_config(folder)
    target = Target(decoder_config(config), device=device, dtype=dtype)
    load_weights(target, folder)
    return target.requires_grad_(False).eval(), context_len_of(config, None)


def history_of(trainer: Trainer) -> pd.DataFrame:
    """What a run logged, a row a step."""
    rows = [{"step": p.step, "lr": p.lr, **p.scalars, "elapsed_s": p.elapsed_s} for p in trainer.history]
    return pd.DataFrame(rows)


_RECIPE = {f.name for f in fields(Recipe)}
_SHAPE = set(inspect.signature(drafter_model).parameters) - {"target", "mask_token_id", "context_len"}


def _sorted_options(options: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    for name in options:
        if name not in _RECIPE | _SHAPE:
            raise unknown("option", name, sorted(_RECIPE | _SHAPE))
    recipe = {k: v for k, v in options.items() if k in _RECIPE}
    if options.get("drafter") == "dflash":
        recipe.setdefault("weights", LossWeights(ce=1.0, l1=0.0, confidence=0.0))
    return Recipe(**recipe), {k: v for k, v in options.items() if k in _SHAPE}


def _states(name: str, target: Target, model: ModelConfig, data: TokenData, device: torch.device) -> TargetStates:
    layers = model.drafter.target_layer_ids
    if name == "on_the_fly":
        return OnTheFly(target, layers)
    if name == "cached":
        return Cached(target, layers, data, device=device)
    raise unknown("states", name, STATES)


def _check_tokens(data: TokenData, model: ModelConfig) -> None:
    low, high, vocab = int(data.tokens.min()), int(data.tokens.max()), model.target.vocab_size
    if low < 0 or high >= vocab:
        raise LabError(f"data has token ids from {low} to {high}; legal ids of this target are 0 to {vocab - 1}.")
    if data.seq_len > model.context_len:
        raise LabError(
            f"sequences of {data.seq_len} tokens are longer than the target's context of {model.context_len}; cut them."
        )
