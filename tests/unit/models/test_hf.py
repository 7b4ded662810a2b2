"""Target logits against transformers, through files that transformers wrote."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dspark_lab.models.checkpoint import load_weights
from dspark_lab.models.config_json import decoder_config, read_config
from dspark_lab.models.decoder import Target

DENSE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
MOE = {**DENSE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}


def hf_model(kind: str, **changes):
    torch.manual_seed(1)
    with torch.inference_mode(False):
        if kind == "dense":
            model = Qwen3ForCausalLM(Qwen3Config(**{**DENSE, **changes}))
        else:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**MOE, **changes}))
            model.set_experts_implementation("eager")
        for name, p in model.named_parameters():
            noise = torch.randn_like(p)
            p.data = (
                1 + 0.3 * noise if "norm" in name else noise * (1.0 if "embed" in name else 0.7 * p.shape[-1] ** -0.5)
            )
    return model.eval()


def load(folder) -> Target:
    target = Target(decoder_config(read_config(folder)))
    load_weights(target, folder)
    return target


def full(target, plain, ids):
    b, n = ids.shape
    cache = target.new_cache(b, n)
    return target.logits(
        target(plain.batch_of(ids, torch.zeros(b, dtype=torch.int64), torch.arange(b)), cache).hidden
    ).view(b, n, -1)


CASES = [
    ("dense", {}),
    ("dense", {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    ("dense", {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True}),
    ("dense", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("moe", {}),
    ("moe", {"norm_topk_prob": False, "moe_intermediate_size": 10}),
    ("moe", {"mlp_only_layers": [1]}),
    ("moe", {"decoder_sparse_step": 2, "num_key_value_heads": 3, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize("shards", [None, "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_logits_equal_transformers(kind, changes, shards, tmp_path, plain):
    model = hf_model(kind, **changes)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() is bool(shards)
    ids = torch.randint(0, 96, (3, 17))
    difference = (full(load(tmp_path), plain, ids) - model(ids).logits).abs().max().item()
    assert difference < 1e-4


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_chunks_of_ragged_requests_equal_the_whole(kind, tmp_path, plain):
    model = hf_model(kind)
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    lengths, slots = torch.tensor([9, 4, 13]), torch.tensor([2, 0, 3])
    ids = torch.randint(0, 96, (3, 24))
    cache = target.new_cache(4, 32)
    for row in range(3):
        start = torch.zeros(1, dtype=torch.int64)
        target(plain.batch_of(ids[row : row + 1, : lengths[row]], start, slots[row : row + 1]), cache)
    for width in (1, 6, 3):
        chunk = torch.stack([ids[row, n : n + width] for row, n in enumerate(lengths)])
        out = target.logits(target(plain.batch_of(chunk, lengths, slots), cache).hidden).view(3, width, -1)
        for row in range(3):
            end = int(lengths[row]) + width
            expected = model(ids[row : row + 1, :end]).logits[0, -width:]
            assert (out[row] - expected).abs().max() < 1e-4
        lengths = lengths + width


def test_captured_layers_are_raw_outputs(tmp_path, plain):
    model = hf_model("moe")
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    ids = torch.randint(0, 96, (2, 7))
    batch = plain.batch_of(ids, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    aux = target(batch, target.new_cache(2, 8), capture_layers=(-1, 0, 1)).aux
    states = model(ids, output_hidden_states=True).hidden_states
    assert (aux - torch.cat(states[:3], dim=-1).view(14, -1)).abs().max() < 1e-4
    assert target(batch, target.new_cache(2, 8)).aux.shape == (14, 0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_old_key_names(kind, tmp_path, plain):
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 30_000.0}}
    model = hf_model(kind, head_dim=8, **theta)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = None
    if kind == "moe":
        config["num_experts"] = config.pop("num_local_experts", None) or config["num_experts"]
        del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(0, 96, (1, 11))
    assert (full(load(tmp_path), plain, ids) - model(ids).logits).abs().max() < 1e-4


def test_fused_expert_names(tmp_path, plain):
    from safetensors.torch import load_file, save_file

    model = hf_model("moe")
    model.save_pretrained(tmp_path)
    tensors = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if ".experts." not in k}
    tensors |= {k: v.detach().clone() for k, v in model.state_dict().items() if ".experts." in k}
    assert any(k.endswith("experts.gate_up_proj") for k in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.randint(0, 96, (1, 11))
    assert (full(load(tmp_path), plain, ids) - model(ids).logits).abs().max() < 1e-4
