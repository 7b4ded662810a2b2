"""Misuse of `lab.train_drafter`: every fault is one line that names the value, and no checkpoint or step is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import dspark_lab as lab
from dspark_lab.runs.store import data_dir
from dspark_lab.train.run import STATE_FILE

TARGET = data_dir() / "models" / "target"
OPTIONS: dict[str, Any] = {
    "mask_token_id": 0, "seq_len": 32, "device": "cpu", "num_steps": 4, "batch_size": 2, "num_anchors": 4, "block_size": 4,
    "num_layers": 1, "log_every": 1,
}  # fmt: skip
TEXTS = [list(range(i, i + 32)) for i in range(0, 96, 8)]


def train(out: Path, texts: Any = TEXTS, **changes: Any) -> Any:
    return lab.train_drafter(TARGET, texts, out=out, **OPTIONS | changes)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was stopped after its first step."""
    folder = tmp_path_factory.mktemp("begun") / "drafter"
    assert not train(folder, should_stop=lambda: True).complete
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": -1}, {"num_steps": 2.5}, {"num_steps": "4"}, {"batch_size": 0}, {"num_anchors": 0},
        {"peak_lr": float("nan")}, {"peak_lr": -1.0}, {"peak_lr": "fast"}, {"warmup": 2.0}, {"weight_decay": -1.0},
        {"weights": {"ce": 1}}, {"seed": -1}, {"seed": 2**70}, {"log_every": 0}, {"save_every": None}, {"seq_len": "a"},
        {"graph": True}, {"progress": 3}, {"should_stop": 3}, {"mask_token_id": -1}, {"mask_token_id": None},
        {"block_size": 0}, {"markov_rank": "8"}, {"num_layers": 0}, {"intermediate_size": -5}, {"target_layer_ids": (99,)},
        {"target_layer_ids": (1, 1)}, {"num_target_layers_read": "a"}, {"confidence": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_is_none_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=rf"^{next(iter(change))}\b"):
        train(tmp_path / "d", **change)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("texts", [None, 3, "text", ["a text"], [1, 2, 3], [[1.5] * 32], [[2**40] * 32]], ids=repr)
def test_data_that_is_none_is_named(texts: Any, tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=r"^data"):
        train(tmp_path / "d", texts)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "mine")
    before = (tmp_path / "mine" / "model.safetensors").read_bytes()
    with pytest.raises(lab.LabError, match=r"holds a checkpoint and no training\.pt"):
        train(tmp_path / "mine")
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == before


def test_an_untrained_drafter_can_be_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert len(train(tmp_path / "d", num_steps=0).history) == 0


def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    seen: list[Any] = []
    with pytest.raises(lab.LabError, match="cannot be written"):
        train(tmp_path / "file" / "d", progress=seen.append)
    assert not seen


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"block_size": 3}, "block_size"),
        ({"mask_token_id": 1}, "mask_token_id"),
        ({"num_layers": 2}, "draft_num_hidden_layers"),
        ({"markov_head": "rnn"}, "markov_head"),
        ({"seq_len": 24}, "data"),
        ({"texts": TEXTS[1:]}, "data"),
    ],
    ids=str,
)
def test_another_run_is_not_gone_on_with(begun: Path, change: dict[str, Any], name: str) -> None:
    with pytest.raises(lab.LabError, match=f"is of another run: {name}="):
        train(begun, **change)


@pytest.mark.parametrize("left", [b"", b"junk" * 100, None], ids=["empty", "junk", "cut"])
def test_a_state_that_is_none_is_named(begun: Path, left: bytes | None, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "d")
    state = tmp_path / "d" / STATE_FILE
    state.write_bytes(state.read_bytes()[:20_000] if left is None else left)
    with pytest.raises(lab.LabError, match="is no state of a training"):
        train(tmp_path / "d")


def test_an_interrupt_keeps_the_step_at_hand(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))

    def interrupt(at: Any) -> None:
        if at.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    steps: list[int] = []
    resumed = train(tmp_path / "cut", progress=lambda at: steps.append(at.step))
    assert steps == [3, 4]
    assert resumed.history["total"].equals(whole.history["total"])
