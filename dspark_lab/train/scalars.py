"""`ScalarLog`: a training's progress as TensorBoard scalars, written with TensorBoard's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_lab.errors import LabError
from dspark_lab.train.trainer import Progress


class ScalarLog:
    """A context in which `both` writes what it passes on; without a folder it writes nothing."""

    def __init__(self, logdir: str | Path | None) -> None:
        self.logdir = logdir
        self._writer: Any = None

    def __enter__(self) -> ScalarLog:
        if self.logdir is not None:
            try:
                from tensorboard.summary import Writer
            except ImportError:
                raise LabError(
                    "logdir needs tensorboard: pip install 'dspark-lab[lab]', or leave logdir out."
                ) from None
            try:
                self._writer = Writer(str(self.logdir))
            except OSError as e:
                raise LabError(
                    f"logdir={str(self.logdir)!r} cannot be written: {e.strerror}; choose another folder, or leave logdir out."
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def both(self, progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """A callback that writes scalars and then calls ``progress``."""

        def write(at: Progress) -> None:
            if self._writer is not None:
                for name, value in {**at.scalars, "lr": at.lr}.items():
                    self._writer.add_scalar(f"train/{name}", value, at.step)
            if progress is not None:
                progress(at)

        return write
