"""`train_drafter`: the verb. A target's folder and token sequences in, a drafter's folder out."""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from dspark_lab.config import LabConfig
from dspark_lab.config.kinds import is_int, shown
from dspark_lab.config.parts import EngineConfig, ModelConfig
from dspark_lab.device import device_name, resolve
from dspark_lab.errors import LabError, unknown
from dspark_lab.models.checkpoint import context_len_of, load_weights
from dspark_lab.models.config_json import decoder_config, read_config
from dspark_lab.models.decoder import Target
from dspark_lab.models.save import save_drafter
from dspark_lab.spec.loss import LossWeights
from dspark_lab.train.data import TokenData, digest, token_data
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
    ``complete``; so it is on Ctrl-C, which then goes on its way. bfloat16 with float32 masters on a GPU, float32 on a CPU. Raises
    `LabError` on unknown options, on token ids outside the vocabulary, and where ``out`` cannot be written, or holds the state of
    another run or a checkpoint without a state, which is not overwritten.
    """
    started, out, where = time.perf_counter(), _folder(out), resolve(device)
    _check_calls(where, graph=graph, log_every=log_every, save_every=save_every, progress=progress, should_stop=should_stop)  # fmt: skip
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    frozen, context_len = load_target(target, where, dtype)
    recipe, shape = _sorted_options(options)
    model = drafter_model(frozen.cfg, mask_token_id=mask_token_id, context_len=context_len, **shape)
    LabConfig(
        preset="trained", model=model, engine=EngineConfig(prompt_len=1, max_new_tokens=1)
    )  # every rule of a config
    data = data if isinstance(data, TokenData) else token_data(data, seq_len)
    _check_tokens(data, model)
    drafter = new_drafter(model, frozen, recipe.seed, device=where, dtype=dtype)
    task = DrafterTask(frozen, drafter, data, recipe, _states(states, frozen, model, data, where))
    _check_writable(out)
    about = {"data": data.digest, "target": _digest_of(frozen), **_flat(model)}
    trainer = Trainer(task, recipe, graph=where.type == "cuda" if graph is None else graph, about=about)
    state = out / STATE_FILE
    if state.is_file():
        trainer.load(state)
    with ScalarLog(logdir) as log:
        trainer.run(
            log_every=log_every, progress=log.both(progress), state_path=state, save_every=save_every,
            should_stop=should_stop,
        )  # fmt: skip
    if not state.is_file():
        trainer.save(state)  # of no steps at all; a checkpoint without a state is not trained again
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


def _folder(out: Any) -> Path:
    """``out`` as a path. Raises `LabError` where a checkpoint would be lost that no training of ours is to go on from."""
    if not isinstance(out, str | Path):
        raise LabError(f"out={shown(out)} is no path; give the folder that the drafter is written to.")
    out = Path(out)
    if (out / "config.json").exists() and not (out / STATE_FILE).is_file():
        raise LabError(
            f"out={str(out)!r} holds a checkpoint and no {STATE_FILE} to go on from, and training would overwrite it; choose "
            "another folder, or remove this one."
        )
    return out


def _check_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as e:
        raise LabError(f"out={str(out)!r} cannot be written: {e.strerror}; choose a folder that can.") from None


def _check_calls(where: torch.device, *, graph: Any, log_every: Any, save_every: Any, **calls: Any) -> None:
    for name, value in (("log_every", log_every), ("save_every", save_every)):
        if not is_int(value) or value < 1:
            raise LabError(f"{name}={shown(value)} is not a whole number of at least 1: steps.")
    for name, value in calls.items():
        if value is not None and not callable(value):
            raise LabError(f"{name}={shown(value)} cannot be called; give a function, or None.")
    if graph is not None and not isinstance(graph, bool):
        raise LabError(f"graph={shown(graph)} is not True, False or None.")
    if graph and where.type != "cuda":
        raise LabError(f"graph=True needs a GPU and the device is {where}; choose graph=None.")


def _digest_of(target: Target) -> str:
    """Tells targets of one shape apart, by their embeddings, in whatever precision they were loaded."""
    return digest(target.model.embed_tokens.weight.detach().to("cpu", torch.bfloat16).view(torch.int16))


def _flat(model: ModelConfig) -> dict[str, Any]:
    """The toggles of ``model`` that tell one drafter from another, by their flat names."""
    flat = {**vars(model.drafter), **{f"draft_{k}": v for k, v in vars(model.draft).items()}}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}


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
