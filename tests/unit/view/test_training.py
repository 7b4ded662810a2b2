"""The view of a training: curves, Stop and Go on, and what fails turns red. The training is a stand-in of a few steps."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import dspark_lab as lab
from dspark_lab.errors import LabError
from dspark_lab.train.trainer import Progress


def scalars(step: int) -> dict[str, float]:
    return {"total": 3.0 / step, "ce": 4.0 / step, "l1": 2.0 / step, "confidence": 0.5, "accept_length": 1.0 + step / 10, "grad_norm": 1.0}  # fmt: skip


class Training:
    """Of ``num_steps``; goes on from where it was stopped, and waits before a step in ``held`` until it is let go."""

    def __init__(self, num_steps: int = 5, *, held: int | None = None, fails_at: int | None = None) -> None:
        self.num_steps, self.held, self.fails_at = num_steps, held, fails_at
        self.step, self.history, self.reached, self.go = 0, list[dict[str, Any]](), threading.Event(), threading.Event()

    def __call__(self, *, progress: Any, should_stop: Any) -> Any:
        while self.step < self.num_steps:
            if self.step + 1 == self.held:
                self.reached.set()
                assert self.go.wait(10)
            if self.step + 1 == self.fails_at:
                raise LabError("the loss of step 3 is nan")
            self.step += 1
            self.history.append({"step": self.step, **scalars(self.step)})
            progress(Progress(step=self.step, num_steps=self.num_steps, lr=0.1, scalars=scalars(self.step), elapsed_s=1.0))  # fmt: skip
            if should_stop() and self.step < self.num_steps:
                break
        return SimpleNamespace(history=pd.DataFrame(self.history), complete=self.step == self.num_steps, device="Test CPU")  # fmt: skip


def test_it_ends_with_its_curves():
    view = lab.live_training(Training(), title="Mine")
    result = view.wait(10)
    assert result is view.result
    assert view.state == "complete"
    assert list(view.history["step"]) == [1, 2, 3, 4, 5]
    assert view.picture.figure is not None
    lines = {t.name: list(t.y) for t in view.picture.figure.data}
    assert lines["total, weighted"] == [3.0 / s for s in range(1, 6)]
    assert len(lines) == 5
    assert "measured · Test CPU" in view.figure.layout.title.text
    assert (view.stop_button.disabled, view.go_button.disabled, view.bar.value) == (True, True, 1.0)
    assert "Mine" in view._repr_mimebundle_()["text/html"]
    with pytest.raises(LabError, match="nothing runs"):
        view.stop()
    with pytest.raises(LabError, match="is complete"):
        view.start()


def test_a_drawn_picture_grows_in_place():
    view = lab.live_training(Training(held=3), start=False)
    table = pd.DataFrame([{"step": s, **scalars(s)} for s in (1, 2, 3)])
    view.picture.grow(lab.plot.training_curves(table.iloc[:2]))
    live = view.picture._live
    live._js2py_layoutDelta = {"layout_edit_id": 0, "layout_delta": {}}  # the browser's first word
    assert view.picture.drawn
    traces = live.data
    view.picture.grow(lab.plot.training_curves(table, title="Now"))
    assert view.picture._live is live
    assert all(a is b for a, b in zip(live.data, traces, strict=True))
    assert list(live.data[0].y) == [3.0, 1.5, 1.0]
    assert "Now" in live.layout.title.text


def test_stop_and_go_on():
    training = Training(held=3)
    view = lab.live_training(training)
    assert training.reached.wait(10)
    with pytest.raises(LabError, match="runs already"):
        view.start()
    view.stop_button.click()
    training.go.set()
    assert not view.wait(10).complete
    assert (view.state, training.step) == ("stopped", 3)
    assert (view.stop_button.disabled, view.go_button.disabled) == (True, False)
    assert view.bar.value == pytest.approx(3 / 5)
    training.held = None
    view.go_button.click()
    assert view.wait(10).complete
    assert list(view.history["step"]) == [1, 2, 3, 4, 5]
    assert not view.guard.errors


def test_what_fails_turns_red_and_is_raised_by_wait():
    view = lab.live_training(Training(fails_at=3))
    with pytest.raises(LabError, match="step 3 is nan"):
        view.wait(10)
    assert view.state == "failed"
    assert "step 3 is nan" in view.guard.widget.value
    assert view.guard.widget.layout.display == ""
    assert list(view.history["step"]) == [1, 2]
    view.stop_button.click()  # a click with nothing to stop is said, and not raised
    assert "nothing runs" in view.guard.widget.value


def test_waiting_ends_by_time_and_before_the_start(monkeypatch):
    training = Training(held=1)
    view = lab.live_training(training, start=False)
    with pytest.raises(LabError, match="has not begun"):
        view.wait(1)
    view.start()
    with pytest.raises(LabError, match=r"still runs after 0\.05 s"):
        view.wait(0.05)
    monkeypatch.setattr(time, "sleep", interrupted(training))
    assert view.wait(10).complete is False  # an interrupt of the cell stops it
    assert training.step == 1


def interrupted(training: Training) -> Any:
    """``time.sleep`` that is interrupted at first in the main thread, and then lets the training go to its next look."""
    sleep, times = time.sleep, list[float]()

    def instead(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            times.append(seconds)
            if len(times) == 1:
                raise KeyboardInterrupt
            training.go.set()
        sleep(seconds)

    return instead


def test_curves_without_a_step_and_without_heads():
    assert "No step" in lab.plot.training_curves(pd.DataFrame()).layout.annotations[0].text
    table = pd.DataFrame([{"step": s, **scalars(s), "confidence": 0.0, "l1": 0.0} for s in (1, 2)])
    names = [t.name for t in lab.plot.training_curves(table, label="recorded").data]
    assert names == ["total, weighted", "cross entropy", "accept length, training batch"]


def test_a_real_training_stops_and_goes_on_to_the_same_end(tmp_path: Path):
    pytest.importorskip("torch")
    import numpy as np

    from dspark_lab.runs.store import data_dir

    with np.load(data_dir() / "models" / "samples.npz") as arrays:
        rows = arrays["train"][:4, :48].tolist()

    def train(out: str, **more: Any) -> Any:
        return lab.train_drafter(
            data_dir() / "models" / "target", rows, out=tmp_path / out, mask_token_id=255, seq_len=48, device="cpu", num_steps=4,
            batch_size=2, num_anchors=4, num_layers=1, block_size=3, log_every=1, **more,
        )  # fmt: skip

    whole = train("whole")
    cut = train("cut", should_stop=lambda: True)
    assert (cut.complete, list(cut.history["step"])) == (False, [1])
    view = lab.live_training(lambda **more: train("cut", **more))
    resumed = view.wait(60)
    assert resumed.complete
    assert list(view.history["step"]) == [1, 2, 3, 4]
    assert resumed.history.drop(columns="elapsed_s").equals(whole.history.drop(columns="elapsed_s"))
    ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole"))
    assert ours == theirs
