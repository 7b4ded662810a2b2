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
