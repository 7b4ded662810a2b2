"""`Trainer`: the loop over steps, with a state on disk from which an interrupted run goes on with the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dspark_lab.config.kinds import check_fields, shown
from dspark_lab.errors import LabError
from dspark_lab.spec.loss import LossWeights
from dspark_lab.train.interrupt import HeldInterrupt
from dspark_lab.train.optimizer import Optimizer, Schedule
from dspark_lab.train.step import StepRunner


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long, how fast, on what: the defaults are the published recipe at the size of a laptop."""

    num_steps: int = 1000
    batch_size: int = 8
    """Sequences a step."""
    num_anchors: int = 64
    """Blocks a sequence, at most."""
    peak_lr: float = 6e-4
    warmup: float = 0.04
    """Share of the steps."""
    weight_decay: float = 0.0
    weights: LossWeights = LossWeights()  # noqa: RUF009 - frozen
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, legal, fits in (
            ("peak_lr", self.peak_lr, "above 0", self.peak_lr > 0),
            ("warmup", self.warmup, "between 0 and 1: a share of the steps", 0 <= self.warmup <= 1),
            ("weight_decay", self.weight_decay, "of at least 0", self.weight_decay >= 0),
            ("seed", self.seed, "below 2^63", self.seed < 2**63),
        ):
            if not fits:
                raise LabError(f"{name}={value!r} is not a number {legal}.")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, on the host."""

    step: int
    """Steps done."""
    num_steps: int
    lr: float
    scalars: Mapping[str, float]
    """Of the last step: ``total`` and its terms, ``grad_norm``; of drafters ``accept_length``, expected at T=1."""
    elapsed_s: float
    """Since this process took the run up."""


class Task(Protocol):
    """What is trained."""

    @property
    def model(self) -> nn.Module: ...

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars by name, ``total`` among them, on the model's device."""
        ...

    def inputs_of(self, step: int) -> dict[str, Tensor]:
        """What ``losses`` reads in ``step``: a function of the seed and the step alone, of one shape in each."""
        ...


class Trainer:
    """Trains ``task.model`` in place: those of its parameters that require gradients."""

    def __init__(
        self, task: Task, recipe: Recipe, *, graph: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        """``graph``: every step is one captured CUDA graph. ``about``: what else a state must agree in to be gone on from."""
        self.task, self.recipe, self.about = task, recipe, dict(about or {})
        self.schedule = Schedule(peak_lr=recipe.peak_lr, num_steps=recipe.num_steps, warmup=recipe.warmup)
        self.optimizer = Optimizer(task.model, weight_decay=recipe.weight_decay)
        self.step, self.history = 0, list[Progress]()
        self.stopped = False
        """Whether the last `run` was told to stop before its end."""
        self._graph, self._runner = graph, None

    def run(
        self,
        *,
        until: int | None = None,
        log_every: int = 50,
        progress: Callable[[Progress], None] | None = None,
        state_path: Path | None = None,
        save_every: int = 500,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Steps up to ``until`` (None: the last), or to the one after which ``should_stop()``; then the state is saved.

        So it is where Ctrl-C or a callback ends it, after the step at hand. Whatever else does, ``state_path`` holds the last
        state saved.
        """
        started, end = time.perf_counter(), self.recipe.num_steps if until is None else until
        if self._runner is None:
            self._runner = StepRunner(
                self.task.losses, self.optimizer, self.task.inputs_of(self.step), graph=self._graph
            )
        self.stopped = False
        with HeldInterrupt() as held:
            while self.step < end and not self.stopped:
                lr = self.schedule.lr(self.step)
                scalars = self._runner(lr, **self.task.inputs_of(self.step))
                self.step += 1
                due = self.step % log_every == 0 or self.step == end
                at = self._log(scalars, lr, time.perf_counter() - started) if due else None
                try:
                    if at is not None and progress is not None:
                        progress(at)
                    self.stopped = self.step < end and should_stop is not None and should_stop()
                    held.let_go()
                except BaseException:
                    if state_path is not None:
                        self.save(state_path)
                    raise
                if state_path is not None and (self.step % save_every == 0 or self.step == end or self.stopped):
                    self.save(state_path)

    def _log(self, scalars: dict[str, Tensor], lr: float, elapsed_s: float) -> Progress:
        values = {name: float(value) for name, value in scalars.items()}
        if not math.isfinite(values["total"]):
            raise LabError(
                f"the loss of step {self.step} is {values['total']}: training diverged; choose a peak_lr below "
                f"{self.recipe.peak_lr}."
            )
        at = Progress(step=self.step, num_steps=self.recipe.num_steps, lr=lr, scalars=values, elapsed_s=elapsed_s)
        self.history.append(at)
        return at

    # -- an interrupted run --------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """The whole state, under a temporary name and renamed. Raises `LabError` where it cannot be written."""
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "about": self.about,
            "optimizer": self.optimizer.state_dict(),
            "history": [vars(p) | {"scalars": dict(p.scalars)} for p in self.history],
        }
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, part)
            part.replace(path)
        except (OSError, RuntimeError) as e:  # a full disk is a RuntimeError of torch
            part.unlink(missing_ok=True)
            raise LabError(
                f"the state of step {self.step} cannot be written to {path}: {shown(e)}; make room there and repeat the call, "
                "which goes on from the last state that was written."
            ) from None

    def load(self, path: Path) -> None:
        """Goes on where `save` stood. Raises `LabError` where the recipe or what it is about is another, and for no state."""
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            theirs = state["recipe"] | (state.get("about") or self.about)  # states of before have none
        except Exception as e:  # whatever unpickling foreign bytes raises
            raise LabError(
                f"{path} is no state of a training, or is cut short ({type(e).__name__}); remove it to begin anew, or choose "
                "another folder."
            ) from None
        for name, ours in (asdict(self.recipe) | self.about).items():
            if theirs.get(name) != ours:
                raise LabError(
                    f"{path} is of another run: {name}={shown(theirs.get(name))} there and {shown(ours)} here; remove it, or "
                    "choose another folder."
                )
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.history = [Progress(**p) for p in state["history"]]
