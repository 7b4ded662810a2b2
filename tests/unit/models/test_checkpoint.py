"""Reading checkpoints: what does not fit is named, and a rank reads its own experts only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_lab.config import preset
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.engine.generate import generate
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.errors import LabError
from dspark_lab.models.checkpoint import load_pair, load_weights
from dspark_lab.models.config_json import decoder_config, read_config
from dspark_lab.models.decoder import Target
from dspark_lab.models.save import save_drafter, save_target
from dspark_lab.models.tensor_files import TensorFiles
from dspark_lab.models.weights import build

PARITY = Path(__file__).parents[2] / "data" / "parity"


@pytest.fixture
def pair(tmp_path):
    """A dense target and its drafter, to be broken."""
    shutil.copytree(PARITY / "qwen3_vanilla_b5", tmp_path / "pair")
    return tmp_path / "pair"


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            del config[name]
        else:
            config[name] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_config_of_a_pair():
    cfg = load_pair(
        PARITY / "qwen3moe_vanilla_b7" / "target", PARITY / "qwen3moe_vanilla_b7" / "drafter", ep_size=2, seed=7
    )
    m = cfg.model
    assert (cfg.preset, m.weights, m.dtype, m.context_len, cfg.parallel.ep_size, cfg.seed) == (
        "checkpoint",
        "checkpoint",
        "float32",
        512,
        2,
        7,
    )
    assert (m.target.num_experts, m.target.num_experts_per_tok, m.target.moe_intermediate_size) == (8, 2, 32)
    assert (m.draft.num_experts, m.draft.num_hidden_layers) == (0, 3)
    assert (m.drafter.block_size, m.drafter.markov_rank, m.drafter.target_layer_ids) == (7, 24, (0, 1, 2))
    assert cfg == type(cfg).from_dict(json.loads(json.dumps(cfg.to_dict())))


def test_toggles_of_the_model_part(pair):
    cfg = load_pair(pair / "target", pair / "drafter", context_len=64, dtype="bfloat16", block_size=5)
    assert (cfg.model.context_len, cfg.model.dtype, cfg.engine.max_new_tokens) == (64, "bfloat16", 42)
    target, drafter = build(cfg)
    assert {p.dtype for p in (*target.parameters(), *drafter.parameters())} == {torch.bfloat16}


def test_block_size_is_the_checkpoints(pair):
    with pytest.raises(LabError, match=r"block_size=7 .*block_size=5"):
        load_pair(pair / "target", pair / "drafter", block_size=7)
    cfg = load_pair(pair / "target", pair / "drafter").replace(block_size=7)
    with pytest.raises(LabError, match=r"block_size=7 .* 5"):
        build(cfg)


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"model_type": ...}, "no model_type"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters=.*linear"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention'"),
        ({"vocab_size": ...}, "no vocab_size"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"model_type": "qwen3_moe"}, r"no num_local_experts \(nor num_experts\)"),
    ],
)
def test_unsupported_configs(pair, side, changes, message):
    edit(pair / side, **changes)
    with pytest.raises(LabError, match=message):
        load_pair(pair / "target", pair / "drafter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "attn"}, "markov_head_type='attn'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"block_size": ...}, "no block_size"),
        ({"target_layer_ids": [0, 9]}, "target_layer_ids"),
        ({"num_target_layers": 5}, "num_target_layers=5"),
        ({"hidden_size": 128}, "hidden_size 128"),
    ],
)
def test_unsupported_drafters(pair, changes, message):
    edit(pair / "drafter", **changes)
    with pytest.raises(LabError, match=message):
        load_pair(pair / "target", pair / "drafter")


BAD_SIZES = [
    ("num_attention_heads", 0),
    ("num_attention_heads", -1),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 0),
    ("head_dim", -16),
    ("head_dim", 15),
    ("decoder_sparse_step", 0),
    ("num_experts_per_tok", 0),
    ("num_experts_per_tok", 99),
    ("num_experts_per_tok", -1),
    ("moe_intermediate_size", 0),
    ("mlp_only_layers", ["a"]),
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
    ("rope_scaling", 5),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 10**400}),
    ("layer_types", 5),
    ("layer_types", [["full_attention"]]),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", 0),
    ("vocab_size", -5),
    ("max_position_embeddings", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD_SIZES)
def test_bad_values_of_a_target(tmp_path, name, value):
    shutil.copytree(PARITY / "qwen3moe_vanilla_b7", tmp_path / "pair")
    edit(tmp_path / "pair" / "target", **{name: value})
    with pytest.raises(LabError, match=rf"config\.json.*{'rope_theta' if isinstance(value, dict) else name}=") as e:
        load_pair(tmp_path / "pair" / "target", tmp_path / "pair" / "drafter")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_layer_ids", ["a"]),
        ("target_layer_ids", [[1]]),
        ("target_layer_ids", [True]),
        ("markov_rank", -1),
        ("block_size", 0),
        ("num_attention_heads", 0),
        ("mask_token_id", 1.5),
    ],
)
def test_bad_values_of_a_drafter(pair, name, value):
    edit(pair / "drafter", **{name: value})
    with pytest.raises(LabError, match=rf"drafter/config\.json.*{name}=") as e:
        load_pair(pair / "target", pair / "drafter")
    assert "\n" not in str(e.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("side", "changes", "message"),
    [
        ("target", {"head_dim": 10**9}, r"head_dim=1000000000.*q_norm\.weight .*shape \[16\]"),
        ("target", {"num_attention_heads": 10**9}, r"num_attention_heads=1000000000 · head_dim=.*q_proj"),
        ("target", {"num_local_experts": 10**9}, r"num_experts=1000000000.*mlp\.gate\.weight .*\[8, 64\]"),
        ("target", {"moe_intermediate_size": 10**9}, r"moe_intermediate_size=1000000000.*experts\.0\.down_proj"),
        ("drafter", {"markov_rank": 10**9}, r"markov_rank=1000000000.*markov_w1\.weight .*\[160, 24\]"),
        ("drafter", {"intermediate_size": 10**9}, r"intermediate_size=1000000000.*gate_proj"),
        ("drafter", {"num_hidden_layers": 10**9}, r"lacks the tensor layers\.3\.self_attn\.q_norm"),
        ("drafter", {"target_layer_ids": [0]}, r"1 target_layer_ids · hidden_size=64.*fc\.weight"),
    ],
)
def test_sizes_are_compared_before_anything_is_allocated(tmp_path, side, changes, message, monkeypatch):
    shutil.copytree(PARITY / "qwen3moe_vanilla_b7", tmp_path / "pair")
    edit(tmp_path / "pair" / side, **changes)
    cfg = load_pair(tmp_path / "pair" / "target", tmp_path / "pair" / "drafter")
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(LabError, match=message) as e:
        build(cfg)
    assert "\n" not in str(e.value)


def test_one_vocabulary_that_is_not_the_files(pair):
    for side in ("target", "drafter"):
        edit(pair / side, vocab_size=10**9)
    with pytest.raises(LabError, match=r"vocab_size=1000000000.*embed_tokens\.weight"):
        build(load_pair(pair / "target", pair / "drafter"))


@pytest.mark.parametrize("value", ["x", 0, -1, True, 64.0, [64]])
def test_context_len_is_a_whole_number(pair, value):
    with pytest.raises(LabError, match=r"context_len=.* whole number of at least 1"):
        load_pair(pair / "target", pair / "drafter", context_len=value)


def test_paths_and_toggles_of_a_wrong_type(pair):
    with pytest.raises(LabError, match="5 is no path"):
        load_pair(5, pair / "drafter")  # type: ignore[arg-type]
    with pytest.raises(LabError, match="dtype=''"):
        load_pair(pair / "target", pair / "drafter", dtype="")
    with pytest.raises(LabError, match="block_size='x'"):
        load_pair(pair / "target", pair / "drafter", block_size="x")


def test_dtype_is_named(pair):
    edit(pair / "target", dtype="float16")
    with pytest.raises(LabError, match="float16"):
        load_pair(pair / "target", pair / "drafter")
    assert load_pair(pair / "target", pair / "drafter", dtype="float32").model.dtype == "float32"


def test_rank_zero_drafter(pair):
    edit(
        pair / "drafter",
        markov_rank=0,
        markov_head_type=...,
        enable_confidence_head=False,
        confidence_head_with_markov=...,
    )
    edit_tensors(pair / "drafter", lambda t: [t.pop(k) for k in list(t) if k.startswith(("markov", "confidence"))])
    cfg = load_pair(pair / "target", pair / "drafter")
    assert (cfg.model.drafter.markov_head, cfg.model.drafter.markov_rank) == ("none", 0)
    _, drafter = build(cfg)
    proposal = drafter.propose(torch.randn(2, 5, 64), torch.tensor([1, 2]))
    assert proposal.confidence is None
    assert torch.equal(proposal.corrected_logits, proposal.base_logits)


@pytest.mark.parametrize(
    "kind",
    [
        {"drafter_kind": "eagle3", "weights": "random"},
        {"drafter_kind": "dflash", "markov_head": "none", "markov_rank": 0, "sample_from_anchor": False},
        {"drafter_kind": "lookup"},
    ],
    ids=lambda k: k["drafter_kind"],
)
def test_every_kind_is_read_as_it_was_saved(kind, tmp_path):
    cfg = preset("tiny", device="cpu", prompt_len=4, max_new_tokens=16, **kind)
    target, drafter = build(cfg)
    save_target(target, cfg.model.target, tmp_path / "target", context_len=64, dtype=torch.float32)
    save_drafter(drafter, cfg.model, tmp_path / "drafter", dtype=torch.float32)
    again = load_pair(tmp_path / "target", tmp_path / "drafter", device="cpu")
    assert again.model.drafter == cfg.model.drafter
    wanted = generate(cfg, [[1, 2, 1, 2]], max_new_tokens=16, models=(target, drafter))
    assert generate(again, [[1, 2, 1, 2]], max_new_tokens=16) == wanted


def test_folders_and_files(pair):
    with pytest.raises(LabError, match="nowhere is no folder"):
        load_pair(pair / "nowhere", pair / "drafter")
    cfg = load_pair(pair / "target", pair / "drafter")
    weights = pair / "target" / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:-100], whole[:50], b"", b"x" * 1000):
        weights.write_bytes(broken)
        with pytest.raises(LabError, match=r"model\.safetensors does not read"):
            build(cfg)
    weights.unlink()
    with pytest.raises(LabError, match=r"neither model\.safetensors nor"):
        build(cfg)
    (pair / "target" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(LabError, match=r"names model-1\.safetensors"):
        build(cfg)
    (pair / "target" / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(LabError, match="no weight_map"):
        build(cfg)
    (pair / "drafter" / "config.json").write_text("{")
    with pytest.raises(LabError, match="not readable JSON"):
        load_pair(pair / "target", pair / "drafter")
    (pair / "drafter" / "config.json").unlink()
    with pytest.raises(LabError, match=r"no config\.json"):
        load_pair(pair / "target", pair / "drafter")


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("target", lambda t: t.pop("model.norm.weight"), r"lacks the tensor model\.norm\.weight \[64\]"),
        (
            "target",
            lambda t: t.update({"lm_head.weight": torch.zeros(160, 32)}),
            r"lm_head\.weight has shape \[160, 32\] .* \[160, 64\]",
        ),
        ("target", lambda t: t.update({"model.extra": torch.zeros(1)}), r"unexpected tensor model\.extra"),
        (
            "target",
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "model.norm.weight has dtype torch.int8",
        ),
        ("drafter", lambda t: t.pop("markov_head.markov_w1.weight"), r"lacks the tensor markov_head\.markov_w1"),
        (
            "drafter",
            lambda t: t.update({"markov_head.gate_proj.weight": torch.zeros(1)}),
            r"unexpected tensor markov_head\.gate_proj",
        ),
    ],
)
def test_tensors_that_do_not_fit(pair, side, change, message):
    edit_tensors(pair / side, change)
    with pytest.raises(LabError, match=message):
        build(load_pair(pair / "target", pair / "drafter"))


def test_known_copies_are_no_surprise(pair):
    edit(pair / "target", tie_word_embeddings=True)
    edit_tensors(pair / "target", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    target, _ = build(load_pair(pair / "target", pair / "drafter"))
    assert target.lm_head is None


@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_a_rank_reads_its_own_experts(placement, fused, tmp_path, monkeypatch):
    folder = tmp_path / "target"
    shutil.copytree(PARITY / "qwen3moe_vanilla_b7" / "target", folder)
    cfg = decoder_config(read_config(folder))
    whole = Target(cfg)
    load_weights(whole, folder)
    if fused:
        tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".experts." not in k}
        tensors |= {k: v.clone() for k, v in whole.state_dict().items() if ".experts." in k}
        save_file(tensors, folder / "model.safetensors")
    read = []
    original = TensorFiles._read
    monkeypatch.setattr(TensorFiles, "_read", lambda self, name, f: (read.append(name), original(self, name, f))[1])
    group = ExpertGroup(parallel=ParallelConfig(ep_size=4, placement=placement), ep_rank=1, all_reduce=lambda t: None)
    part = Target(cfg, group)
    load_weights(part, folder)
    mine = (2, 3) if placement == "contiguous" else (1, 5)
    for a, b in zip(part.model.moe_layers, whole.model.moe_layers, strict=True):
        assert a.experts.expert_ids == mine
        assert torch.equal(a.experts.gate_up_proj, b.experts.gate_up_proj[list(mine)])
        assert torch.equal(a.experts.down_proj, b.experts.down_proj[list(mine)])
    if not fused:
        assert {int(n.split(".experts.")[1].split(".")[0]) for n in read if ".experts." in n} == set(mine)


def test_a_missing_expert_is_named(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(PARITY / "qwen3moe_vanilla_b7" / "target", folder)
    edit_tensors(folder, lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    target = Target(decoder_config(read_config(folder)))
    with pytest.raises(LabError, match=r"lacks the tensor model\.layers\.2\.mlp\.experts\.5\.up_proj"):
        load_weights(target, folder)
