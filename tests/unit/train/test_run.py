"""`lab.train_drafter` on the target that ships: a folder comes out that drafts, scalars are written, a second call has nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_lab as lab
from dspark_lab.engine.generate import generate, generate_plain
from dspark_lab.models.weights import build
from dspark_lab.runs.store import data_dir

TARGET = data_dir() / "models" / "target"
OPTIONS: dict[str, Any] = {
    "mask_token_id": 0, "seq_len": 64, "device": "cpu", "num_steps": 4, "batch_size": 2, "num_anchors": 4, "block_size": 4,
    "num_layers": 1, "log_every": 1, "save_every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> list[list[int]]:
    """Text that the target wrote."""
    with np.load(data_dir() / "models" / "samples.npz") as arrays:
        return arrays["train"][:8, :64].tolist()


def test_a_folder_that_drafts(samples: list[list[int]], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = lab.train_drafter(TARGET, samples, out=tmp_path / "drafter", logdir=tmp_path / "tb", **OPTIONS)
    assert list(made.history["step"]) == [1, 2, 3, 4]
    assert list(tmp_path.glob("tb/*tfevents*"))
    assert made.accept_length > 1.0
    cfg = lab.load_pair(TARGET, made.folder, batch_size=2, device="cpu")
    pair = build(cfg, "cpu")
    for out, prompt in zip(generate(cfg, samples[:2], max_new_tokens=24, models=pair), samples[:2], strict=True):
        assert out.tokens == generate_plain(cfg, prompt, target=pair[0], max_new_tokens=24)
    again = lab.train_drafter(TARGET, samples, out=tmp_path / "drafter", **OPTIONS)
    assert list(again.history["step"]) == [1, 2, 3, 4]
    assert again.history["total"].equals(made.history["total"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_stops": 3}, "option='num_stops'"),
        ({"states": "somewhere"}, "states='somewhere'"),
        ({"drafter": "lookup"}, "drafter='lookup'"),
        ({"seq_len": 2000}, "longer than the target's context of 1024"),
    ],
)
def test_bad_options_are_named(change: dict, said: str, samples: list[list[int]], tmp_path: Path) -> None:
    texts = [row * 40 for row in samples] if "seq_len" in change else samples
    with pytest.raises(lab.LabError, match=said):
        lab.train_drafter(TARGET, texts, out=tmp_path / "d", **{**OPTIONS, **change})
    with pytest.raises(lab.LabError, match="token ids from"):
        lab.train_drafter(TARGET, [[1, 400] * 32], out=tmp_path / "d", **OPTIONS)
