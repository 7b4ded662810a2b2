"""A checkpoint read with the wrong slot shift is found out, and one read right is left alone."""

from __future__ import annotations

import json

import pytest

import dspark_lab as lab
from dspark_lab.config.shipped import data_dir
from dspark_lab.errors import LabError
from dspark_lab.study.slot_shift import SlotShiftWarning

SHIFT = {"dspark-rnn": 0, "dflash": 1}


@pytest.fixture
def prompts() -> list[list[int]]:
    return [lab.held_out(kind)[3][:96] for kind in ("code", "prose")]


@pytest.mark.parametrize("drafter", SHIFT)
def test_read_right(drafter, prompts):
    found = lab.slot_shift(lab.shipped(drafter, device="cpu", batch_size=2), prompts, max_new_tokens=16)
    assert found.configured == SHIFT[drafter]
    assert not found.is_wrong
    assert found.accept_lengths[SHIFT[drafter]] > found.accept_lengths[1 - SHIFT[drafter]] + 0.5
    assert "it is read at shift" in str(found)


@pytest.mark.parametrize("drafter", SHIFT)
def test_read_wrong(drafter, prompts, tmp_path):
    folder = data_dir() / "models" / drafter
    config = json.loads((folder / "config.json").read_text()) | {"sample_from_anchor": SHIFT[drafter] == 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    cfg = lab.load_pair("shipped:target", tmp_path, device="cpu", dtype="float32", batch_size=2)
    right = str(SHIFT[drafter] == 0).lower()
    with pytest.warns(SlotShiftWarning, match=rf"shift 0, .*shift 1, and .* set sample_from_anchor to {right}"):
        found = lab.slot_shift(cfg, prompts, max_new_tokens=16)
    assert found.is_wrong
    assert found.configured == 1 - SHIFT[drafter]
    assert found.accept_lengths[found.configured] < found.accept_lengths[1 - found.configured] - 0.5


def test_drafters_without_a_block_are_refused(prompts):
    with pytest.raises(LabError, match="drafter_kind='eagle3' has no block"):
        lab.slot_shift(lab.shipped("eagle3"), prompts)
    with pytest.raises(LabError, match=r"simulated_accept_length=2\.0"):
        lab.slot_shift(lab.shipped(simulated_accept_length=2.0), prompts)
