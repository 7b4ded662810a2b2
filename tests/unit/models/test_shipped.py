"""The trained models and the held-out text that ship."""

from __future__ import annotations

import json

import pytest

import dspark_lab as lab
from dspark_lab.config.shipped import DRAFTERS, TEXT_KINDS, data_dir, folder_of
from dspark_lab.errors import LabError
from dspark_lab.models.text import held_out_texts, read_turns, text_of, tokens_of


def test_the_preset_is_what_the_files_say():
    assert lab.preset("shipped") == lab.shipped()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_is_there(drafter):
    cfg = lab.shipped(drafter, batch_size=2)
    assert cfg.engine.batch_size == 2
    assert folder_of(str(cfg.model.drafter_path)) == data_dir() / "models" / drafter
    assert (folder_of(str(cfg.model.drafter_path)) / "model.safetensors").is_file()


def test_a_config_of_shipped_models_names_no_folder_of_this_machine():
    assert str(data_dir()) not in json.dumps(lab.shipped().to_dict())


def test_unknown_names_are_told():
    with pytest.raises(
        LabError, match=r"drafter='dspark-rn' is not known; legal: dspark-rnn, .*Did you mean 'dspark-rnn'"
    ):
        lab.shipped("dspark-rn")
    with pytest.raises(LabError, match="shipped model='nothing' is not known"):
        lab.load_pair("shipped:nothing", "shipped:dspark")
    with pytest.raises(LabError, match="kind='poems' is not known; legal: arithmetic, code, prose"):
        lab.held_out("poems")


def test_shipped_models_generate_as_the_target_alone_would():
    cfg = lab.shipped(device="cpu", batch_size=1)
    prompt = lab.held_out("code")[0]
    drafted = lab.generate(cfg, [prompt], max_new_tokens=24)[0]
    plain = lab.generate(cfg.replace(speculate=False), [prompt], max_new_tokens=24)[0]
    assert drafted.tokens == plain.tokens
    assert sum(drafted.acceptance_lengths) / len(drafted.acceptance_lengths) > 1.5


def test_a_shorter_block_is_drafted_and_lossless():
    cfg = lab.shipped(device="cpu", batch_size=1, block_size=3)
    prompt = lab.held_out("prose")[0]
    out = lab.generate(cfg, [prompt], max_new_tokens=24)[0]
    whole = lab.generate(cfg.replace(block_size=7), [prompt], max_new_tokens=24)[0]
    assert out.tokens == whole.tokens
    assert set(out.proposal_lengths) == {3}
    assert max(out.acceptance_lengths) <= 4


@pytest.mark.parametrize("block_size", [0, 8, "x"])
def test_a_block_longer_than_the_checkpoints_is_refused(block_size):
    with pytest.raises(LabError, match=f"block_size={block_size!r} .*7"):
        lab.shipped(block_size=block_size)


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_held_out_text_is_read(kind):
    texts = held_out_texts(kind)
    assert len(texts) == 96
    assert {t.kind for t in texts} == {kind}
    assert all(t.reference for t in texts)
    assert [text_of(p) for p in lab.held_out(kind)] == [t.turns[0] for t in texts]


def test_text_keeps_every_byte():
    assert text_of(tokens_of("γ − née")) == "γ − née"
    assert text_of([104, 105, 0xE2, 0x88]) == "hi\\xe2\\x88"
    with pytest.raises(LabError, match="token 300 is no byte"):
        text_of([300])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", 'line 2 is no object with "turns"'),
        ('{"turns": []}', r"line 2 has turns=\[\]"),
        ('{"turns": "hi"}', "line 2 has turns='hi'"),
        ('{"turns": ["hi", 3]}', "line 2 has turns="),
        ('{"turns": ["hi"], "reference": 3}', "line 2 has reference=3"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, message):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"turns": ["one", "two"], "id": 7}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(LabError, match=message):
        read_turns(path)


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(LabError, match="does not read as text"):
        read_turns(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(LabError, match="has no lines"):
        read_turns(tmp_path / "empty.jsonl")
    (tmp_path / "turns.jsonl").write_text('{"turns": ["one", "two"], "question_id": 7}\n\n')
    assert read_turns(tmp_path / "turns.jsonl")[0].turns == ("one", "two")
