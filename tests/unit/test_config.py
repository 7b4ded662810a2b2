"""`LabConfig`: flat JSON, the presets, and an error for every combination that makes no sense."""

from __future__ import annotations

import dataclasses

import pytest

from dspark_lab.config import ALLOCS, LabConfig, parse_alloc, preset
from dspark_lab.errors import LabError


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_config_survives_json_and_hashes(name: str) -> None:
    cfg = preset(name)
    again = LabConfig.from_dict(cfg.to_dict())
    assert again == cfg
    assert hash(again) == hash(cfg)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("tiny").seed = 3  # type: ignore[misc]


def test_small_has_the_shape_that_was_asked_for() -> None:
    m = preset("small").model
    t = m.target
    assert (t.hidden_size, t.num_attention_heads, t.num_key_value_heads, t.head_dim) == (2048, 16, 4, 128)
    assert (t.num_hidden_layers, m.draft.num_hidden_layers) == (12, 3)
    assert (t.num_experts, t.moe_intermediate_size, t.num_experts_per_tok, t.vocab_size) == (64, 1024, 6, 32_000)
    assert (m.drafter.markov_rank, m.drafter.block_size, m.context_len) == (256, 5, 2048)


@pytest.mark.parametrize(
    ("toggles", "said"),
    [
        ({"alloc": "blokking"}, ["'blokking'", "non_blocking", "Did you mean 'blocking'?"]),
        ({"epsize": 2}, ["'epsize'", "Did you mean 'ep_size'?"]),
        ({"ep_size": 3}, ["ep_size=3", "8 experts", "1, 2, 4, 8", "1 redundant expert (9 in all)"]),
        ({"ep_size": 5}, ["2 redundant experts (10 in all)"]),
        ({"ep_size": 2, "alloc": "none"}, ["alloc='none'", "ep_size=2", "on_demand", "mask_padding=False"]),
        ({"alloc": "graph_slot"}, ["graph_slot", "use_graph=True", "persistent"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"batch_size": 2.5}, ["batch_size=2.5"]),
        ({"batch_size": 1000}, ["largest bucket, 128"]),
        ({"device": "gpu"}, ["device='gpu'", "auto, cpu, cuda"]),
        ({"verify": "thresh"}, ["Did you mean 'threshold'?"]),
        ({"confidence_threshold": 0.5}, ["verify='threshold'"]),
        ({"verify": "threshold", "confidence_threshold": 1.5}, ["1.5", "between 0 and 1"]),
        ({"verify": "threshold", "enable_confidence_head": False}, ["confidence head"]),
        ({"simulated_accept_length": 9.0}, ["1 to 6"]),
        ({"drafter_kind": "dflash"}, ["markov_rank=48", "markov_head='none' and markov_rank=0"]),
        ({"max_new_tokens": 5000}, ["context_len=1024", "at most 1002"]),
        ({"mask_token_id": 256}, ["vocabulary of 256"]),
        ({"target_layer_ids": (1, 0)}, ["strictly increase"]),
        ({"transfer": "none", "guard": "always"}, ["contradicts itself"]),
        ({"transfer": "smoke", "guard": "always"}, ["transfer='smoke'"]),
        ({"weights": "checkpoint"}, ["target_path"]),
        ({"tp_size": 2, "ep_size": 4, "attn_dp": 3}, ["world size"]),
        ({"target_num_experts": 0, "draft_num_experts": 0, "ep_size": 2}, ["needs experts"]),
        ({"host_work_us": float("nan")}, ["host_work_us"]),
        ({"tp_size": 4}, ["tp_size=4", "target's num_key_value_heads=2", "1, 2."]),
        ({"tp_size": 3}, ["tp_size=3", "1, 2."]),
        ({"tp_size": 2, "draft_num_key_value_heads": 1}, ["drafter's num_key_value_heads=1", ": 1."]),
        ({"tp_size": 2, "target_mlp_only_layers": (0,), "target_intermediate_size": 127}, ["intermediate_size=127"]),
        (
            {"tp_size": 2, "draft_moe_intermediate_size": 33},
            ["drafter's moe_intermediate_size=33", "ep_size=2", "1, 3, 11, 33"],
        ),
    ],
)
def test_bad_values_are_named_with_the_way_out(toggles: dict, said: list[str]) -> None:
    with pytest.raises(LabError) as e:
        preset("tiny", **toggles)
    for words in said:
        assert words in str(e.value)
    assert "\n" not in str(e.value)


WRONG: dict[str, tuple] = {
    "seed": ("7", 1.0, True, -1, None),
    "device": (0, None, ["cpu"]),
    "mask_padding": ("yes", 1, None),
    "use_graph": (1, "False"),
    "overlap": ("off",),
    "buckets": ([], 4, "1,2", [0, 4], [4, -1], [4.0], [True], [[4]], None),
    "confidence_threshold": ("0.5", True, None, float("nan"), -0.1),
    "simulated_accept_length": ("3", True, float("inf"), [3.0]),
    "host_work_us": ("200", True, None, -1, float("inf"), 10**400),
    "alloc": (None, 3, ["none"], {}),
    "target_layer_ids": (["a"], [[1]], 0, "01", [0.0], [], [True]),
    "mask_token_id": (1.0, "255", None, True, -1),
    "markov_rank": (-1, 1.5, True, "48"),
    "enable_confidence_head": (1, "no"),
    "target_path": (5, ["a"]),
    "weights": (None, ["random"]),
    "dtype": (32, None),
    "max_new_tokens": (0, -1, True, "8"),
    "target_vocab_size": (1, "256", 256.0),
    "draft_num_hidden_layers": (0, True, -2),
    "target_num_attention_heads": (0, -1, 3),
    "target_head_dim": (-16, 15, "16"),
    "target_num_experts": (-1, "8"),
    "target_num_experts_per_tok": (0, 9, -1, 1.0),
    "draft_moe_intermediate_size": (0, -1),
    "draft_decoder_sparse_step": (0, -1),
    "target_rms_norm_eps": (0, float("nan"), -1e-6, "1e-6"),
    "draft_rope_theta": (0.0, float("inf"), None),
    "target_mlp_only_layers": (["a"], 0),
    "draft_tie_word_embeddings": (0,),
    "preset": (None, 3, "", "a/b", "..", "a..b", "a b", "a\n", "é", "x" * 65, "-x", ".x"),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values])
def test_wrong_types_and_sizes_are_named(name: str, value) -> None:
    cfg = preset("tiny")
    for make in (lambda: cfg.replace(**{name: value}), lambda: LabConfig.from_dict({**cfg.to_dict(), name: value})):
        with pytest.raises(LabError) as e:
            make()
        assert f"{name}=" in str(e.value)
        assert "\n" not in str(e.value)
        assert len(str(e.value)) < 300


def test_whole_numbers_are_numbers_and_labels_are_free() -> None:
    cfg = preset("tiny", host_work_us=5, simulated_accept_length=2, buckets=[4, 8], preset="my-run_1.b")
    assert (cfg.engine.host_work_us, cfg.engine.buckets, cfg.preset) == (5, (4, 8), "my-run_1.b")
    assert LabConfig.from_dict(cfg.to_dict()) == cfg


def test_a_list_of_toggles_is_no_config() -> None:
    with pytest.raises(LabError, match="list"):
        LabConfig.from_dict([])  # type: ignore[arg-type]
    with pytest.raises(LabError, match="preset="):
        preset(["tiny"])  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dense", [(), (0, 3), (1, 1, 5, 99, -1)])
def test_moe_layers_are_counted(step: int, dense: tuple[int, ...]) -> None:
    t = preset(
        "tiny", target_num_hidden_layers=7, target_decoder_sparse_step=step, target_mlp_only_layers=dense
    ).model.target
    assert t.num_moe_layers == sum(t.is_moe_layer(i) for i in range(7))


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(LabError, match=r"'tinny'.*tiny, small.*Did you mean 'tiny'"):
        preset("tinny")


def test_mask_off_makes_none_legal_at_any_ep_size() -> None:
    cfg = preset("tiny", ep_size=2, alloc="none", mask_padding=False)
    assert not cfg.needs_scalar
    assert not cfg.builds_scalar


@pytest.mark.parametrize("name", list(ALLOCS))
@pytest.mark.parametrize("predicate", [False, True])
def test_guards_say_when_the_scalar_is_built(name: str, predicate: bool) -> None:
    expected = {"never": False, "always": True, "on_demand": predicate}[ALLOCS[name].guard]
    assert ALLOCS[name].builds(predicate) is expected


def test_transfer_and_guard_can_be_given_apart() -> None:
    cfg = preset("tiny", transfer="pinned", guard="always")
    assert cfg.engine.alloc == "pinned:always"
    assert parse_alloc("pinned:always").builds(False)
    assert preset("tiny", transfer="non_blocking", guard="on_demand").engine.alloc == "on_demand"


def test_world_size_is_derived_and_whole() -> None:
    p = preset("tiny", ep_size=4).parallel
    assert (p.world_size, p.replicas, p.moe_tp) == (4, 4, 1)
    p = preset("tiny", tp_size=2).parallel
    assert (p.world_size, p.replicas, p.moe_tp) == (2, 1, 2)
    p = preset("tiny", tp_size=2, ep_size=4).parallel
    assert (p.world_size, p.replicas, p.moe_tp) == (4, 2, 1)


def test_tp_sizes_that_divide_are_legal() -> None:
    assert preset("tiny", tp_size=2, target_vocab_size=255, draft_vocab_size=255, mask_token_id=0).parallel.tp_size == 2
    preset("tiny", tp_size=2, target_intermediate_size=127)  # no dense layer reads it
    preset(
        "tiny", tp_size=2, ep_size=2, target_moe_intermediate_size=63, draft_moe_intermediate_size=63
    )  # whole experts
    preset("small", tp_size=4)
