"""Tensor parallelism: any layout gives what one rank gives, each rank holds its part, and two collectives a layer do it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_lab.config.lab import LabConfig
from dspark_lab.config.parts import ParallelConfig
from dspark_lab.config.presets import preset
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ONE_RANK, ParallelGroups
from dspark_lab.errors import LabError
from dspark_lab.models.checkpoint import load_pair
from dspark_lab.models.decoder import Target
from dspark_lab.models.moe import Experts
from dspark_lab.models.shards import Shard, Vocabulary, shard_of
from dspark_lab.models.tensor_files import TensorFiles
from dspark_lab.models.weights import build
from dspark_lab.plan.memory import plan_memory

PARITY = Path(__file__).parents[2] / "data" / "parity"
DENSE = {"target_num_experts": 0, "draft_num_experts": 0}
FOUR_HEADS = {
    "target_num_attention_heads": 8,
    "target_num_key_value_heads": 4,
    "draft_num_attention_heads": 8,
    "draft_num_key_value_heads": 4,
}
MIXED = {"target_mlp_only_layers": (0,), "target_attention_bias": True, "draft_attention_bias": True}
ODD = {"target_vocab_size": 253, "draft_vocab_size": 253, "mask_token_id": 252}


def config(**toggles) -> LabConfig:
    return preset("tiny", **{"weights": "random", "mask_padding": False, **FOUR_HEADS, **toggles})


def round_of(cfg: LabConfig, plain, groups: ParallelGroups) -> dict[str, torch.Tensor]:
    """Prefill, context, a drafted block and its verification over two requests: all that the models compute, gathered."""
    target, drafter = build(cfg, groups=groups)
    gamma, slots = cfg.model.drafter.block_size, torch.arange(2)
    target_cache, cache = target.new_cache(2, 32), drafter.new_cache(2, 32)
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 250, (2, 9), generator=g)
    layers = cfg.model.drafter.target_layer_ids
    batch = plain.batch_of(ids, torch.zeros(2, dtype=torch.int64), slots)
    out = target(batch, target_cache, capture_layers=layers)
    drafter.write_context(out.aux, batch.token_slots, batch.positions, cache)
    anchors = target.argmax(out.hidden).view(2, 9)[:, -1]
    block = torch.full((2, gamma), cfg.model.drafter.mask_token_id)
    block[:, 0] = anchors
    starts = torch.full((2,), 9)
    proposal = drafter.propose(drafter(plain.batch_of(block, starts, slots, block=True), cache), anchors)
    tokens = torch.cat((anchors[:, None], proposal.draft_tokens), dim=1)
    verified = target(plain.batch_of(tokens, starts, slots), target_cache)
    return {
        "aux": out.aux,
        "logits": target.logits(out.hidden),
        "argmax": target.argmax(out.hidden),
        "base_logits": drafter.vocab.gather(proposal.base_logits),
        "corrected_logits": drafter.vocab.gather(proposal.corrected_logits),
        "draft_tokens": proposal.draft_tokens,
        "confidence": proposal.confidence,
        "verify_logits": target.logits(verified.hidden),
        "verify_argmax": target.argmax(verified.hidden),
    }


@pytest.mark.parametrize(
    ("parallel", "shape"),
    [
        ({"tp_size": 2}, {}),
        ({"tp_size": 4}, {}),
        ({"tp_size": 2}, DENSE),
        ({"tp_size": 4}, {**DENSE, **ODD}),
        ({"tp_size": 2, "ep_size": 2}, {}),
        ({"tp_size": 4, "ep_size": 2}, ODD),  # two ranks share each expert
        ({"tp_size": 4, "ep_size": 2, "placement": "round_robin"}, MIXED),
        ({"tp_size": 2, "ep_size": 4}, MIXED),  # two replicas of attention
        ({"ep_size": 2}, MIXED),
        ({"tp_size": 2}, {"draft_num_experts": 0, "target_tie_word_embeddings": True, **ODD}),
        ({"tp_size": 2}, {"markov_rank": 0, "markov_head": "none", "confidence_head_with_markov": False}),
        ({"tp_size": 2}, {"weights": "bigram"}),
    ],
    ids=str,
)
def test_any_layout_gives_what_one_rank_gives(parallel: dict, shape: dict, plain) -> None:
    one = round_of(config(**shape), plain, ParallelGroups())
    assert (one["logits"].argmax(-1) == one["argmax"]).all()
    cfg = config(**shape, **parallel)
    ranks = plain.on_ranks(cfg.parallel, lambda groups: round_of(cfg, plain, groups))
    assert len(ranks) == cfg.parallel.world_size
    for got in ranks:
        for name, value in one.items():
            assert got[name].shape == value.shape, name
            if value.dtype == torch.int64:
                assert torch.equal(got[name], value), name
            else:
                assert (got[name] - value).abs().max() < 1e-5 * max(1, value.abs().max()), name
            assert torch.equal(got[name], ranks[0][name]), name


def parts_by_name(pair) -> dict[str, tuple[torch.Tensor, Shard | None, tuple[int, ...] | None]]:
    out = {}
    for who, module in zip(("target", "drafter"), pair, strict=True):
        owners = {name: m for name, m in module.named_modules() if isinstance(m, Experts)}
        for name, p in module.named_parameters():
            owner = owners.get(name.rpartition(".")[0])
            out[f"{who}.{name}"] = p, shard_of(p), None if owner is None else owner.expert_ids
    return out


@pytest.mark.parametrize("weights", ["random", "bigram"])
@pytest.mark.parametrize(
    "parallel", [{"tp_size": 2}, {"tp_size": 4, "ep_size": 2}, {"tp_size": 2, "ep_size": 4}], ids=str
)
def test_parts_of_all_ranks_make_the_whole(parallel: dict, weights: str, plain) -> None:
    cfg = config(weights=weights, **ODD, **parallel)
    whole = {name: p for name, (p, _, _) in parts_by_name(build(config(weights=weights, **ODD))).items()}
    seen = {name: torch.full_like(p, float("nan")) for name, p in whole.items()}
    pairs = plain.on_ranks(cfg.parallel, lambda groups: build(cfg, groups=groups))
    cut = set()
    for pair in pairs:
        for name, (p, shard, experts) in parts_by_name(pair).items():
            places = [((e,), i) for i, e in enumerate(experts)] if experts else [((), None)]
            for index, i in places:
                part = p if i is None else p[i]
                if shard is None:
                    seen[name][index] = part
                    continue
                cut.add(name)
                for here, there in shard.pieces():
                    seen[name][index][there] = part[here]
    for name, p in whole.items():
        assert torch.equal(seen[name], p), name
    kept_whole = {n.rpartition(".")[0].rpartition(".")[2] for n in set(whole) - cut}
    moe_parts = {"experts"} if cfg.parallel.moe_tp == 1 else set()
    norms = {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "hidden_norm"}
    assert kept_whole - moe_parts == norms | {"gate", "fc", "markov_w1", "proj"}
    for rank in pairs[1:]:
        assert rank[0].num_bytes == pytest.approx(pairs[0][0].num_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("parallel", "shape"),
    [
        ({}, {}),
        ({}, DENSE),
        ({"tp_size": 2}, {}),
        ({"tp_size": 4}, DENSE),
        ({"tp_size": 2, "ep_size": 2}, ODD),
        ({"tp_size": 4, "ep_size": 2}, {"target_tie_word_embeddings": True}),
        ({}, {"drafter_kind": "eagle3"}),
        ({}, {"drafter_kind": "lookup"}),
    ],
    ids=str,
)
def test_memory_is_planned_as_it_is_used(parallel: dict, shape: dict, plain) -> None:
    cfg = config(**shape, **parallel)
    plan = plan_memory(cfg)

    def used(groups: ParallelGroups) -> tuple[int, int]:
        target, drafter = build(cfg, groups=groups)
        caches = [m.new_cache(cfg.engine.batch_size, cfg.model.context_len).num_bytes for m in (target, drafter)]
        return target.num_bytes + drafter.num_bytes, sum(caches)

    for weights_bytes, cache_bytes in plain.on_ranks(cfg.parallel, used):
        assert weights_bytes == pytest.approx(plan.weights_bytes, rel=0.01)
        assert cache_bytes == plan.cache_bytes
    one = plan_memory(config(**shape))
    assert plan.cache_bytes * cfg.parallel.tp_size == one.cache_bytes
    assert plan.logits_bytes * cfg.parallel.tp_size == pytest.approx(one.logits_bytes, rel=1e-3)


def test_weights_of_a_rank_are_its_share() -> None:
    shapes = [preset("small", tp_size=t) for t in (1, 2, 4)]
    one, two, four = (plan_memory(cfg).weights_bytes for cfg in shapes)
    assert two / one == pytest.approx(1 / 2, rel=0.02)
    assert four / one == pytest.approx(1 / 4, rel=0.04)


@pytest.mark.parametrize("shape", [{}, DENSE], ids=["moe", "dense"])
def test_two_collectives_a_layer_and_no_logits_on_the_way(shape: dict, plain) -> None:
    cfg = config(tp_size=2, **shape)

    def count(groups: ParallelGroups) -> list[int]:
        target, drafter = build(cfg, groups=groups)
        sent = []

        def tick() -> None:
            sent.append((groups.tp.num_reduced + groups.moe.num_reduced, groups.tp.num_gathered))
            groups.tp.num_reduced = groups.moe.num_reduced = groups.tp.num_gathered = 0

        ids = torch.randint(0, 250, (2, 5), generator=torch.Generator().manual_seed(0))
        batch = plain.batch_of(ids, torch.zeros(2, dtype=torch.int64), torch.arange(2))
        out = target(batch, target.new_cache(2, 8), capture_layers=(0, 1))
        tick()
        target.argmax(out.hidden)
        tick()
        cache = drafter.new_cache(2, 16)
        drafter.write_context(out.aux, batch.token_slots, batch.positions, cache)
        tick()
        hidden = drafter(plain.batch_of(ids, torch.full((2,), 5), torch.arange(2), block=True), cache)
        tick()
        drafter.propose(hidden, ids[:, 0])
        tick()
        assert groups.tp.most_gathered == 2 * 10  # value and id a row
        assert groups.moe.num_gathered == 0
        return sent

    for sent in plain.on_ranks(cfg.parallel, count):
        assert sent == [(1 + 2 * 2, 0), (0, 1), (0, 0), (1 + 2 * 1, 0), (0, 5)]


# -- the vocabulary ----------------------------------------------------------------------------------------------


def vocab_of(size: int, ranks: int, plain, work):
    return plain.on_ranks(ParallelConfig(tp_size=ranks), lambda groups: work(Vocabulary(size, groups.tp)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [4, 5, 7, 64, 97])
def test_argmax_over_ranks_is_the_argmax(size: int, ranks: int, dtype: torch.dtype, plain) -> None:
    g = torch.Generator().manual_seed(size)
    logits = torch.cat(
        (
            torch.randn(40, size, generator=g),
            torch.randint(-2, 1, (200, size), generator=g).float(),  # ties within ranks and over them
            torch.full((1, size), -3.0),  # all equal, and below what padding would hold
            torch.full((1, size), float("-inf")),
            torch.full((1, size), -0.0),
        )
    ).to(dtype)
    logits[0, size // 2], logits[1, -1], logits[2, 0] = float("nan"), float("inf"), float("inf")
    for best, whole in vocab_of(
        size, ranks, plain,
        lambda v: (v.argmax(logits[:, v.first : v.first + v.num]), v.gather(logits[:, v.first : v.first + v.num])),
    ):  # fmt: skip
        assert best.dtype == torch.int64
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(whole[3:], logits[3:])
        assert whole.shape == logits.shape


def test_ids_of_a_wide_vocabulary_are_exact(plain) -> None:
    size = 2**24 + 4  # float32 does not hold its last id

    def last(v: Vocabulary) -> torch.Tensor:
        logits = torch.zeros(1, 1).expand(1, v.num).clone()
        logits[0, -1] = v.tp.rank + 1.0
        return v.argmax(logits)

    assert [int(x) for x in vocab_of(size, 2, plain, last)] == [size - 1, size - 1]


def test_shards_cover_everything_once() -> None:
    for whole in range(1, 40):
        for size in range(1, min(whole, 8) + 1):
            shards = [Shard(dim=0, whole=whole, rank=r, size=size) for r in range(size)]
            assert [i for s in shards for i in range(s.start, s.stop)] == list(range(whole))
            assert max(s.num for s in shards) - min(s.num for s in shards) <= 1


def test_a_rank_ignores_what_its_table_holds_for_others(plain) -> None:
    cfg = config(tp_size=2)

    def work(groups: ParallelGroups) -> torch.Tensor:
        target, _ = build(cfg, groups=groups)
        table = target.model.embed_tokens
        table.weight[0] = float("nan")  # stands in for every other rank's id, and is never picked
        ids = torch.tensor([5, 140, 255, -7, 2**40])
        return table(ids)

    rows = plain.on_ranks(cfg.parallel, work)
    table = build(config())[0].model.embed_tokens.weight
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0][:3], table[[5, 140, 255]])
    assert (rows[0][3:] == 0).all()


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
def test_a_rank_reads_its_own_slices(fused: bool, plain, tmp_path, monkeypatch) -> None:
    source = PARITY / "qwen3moe_vanilla_b7"
    folder = tmp_path / "target"
    shutil.copytree(source / "target", folder)
    whole = build(load_pair(folder, source / "drafter"))
    if fused:
        tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".experts." not in k}
        tensors |= {k: v.clone() for k, v in whole[0].state_dict().items() if ".experts." in k}
        save_file(tensors, folder / "model.safetensors")
    num_read = 0
    original = TensorFiles._read

    def count(self, name, read):
        nonlocal num_read
        value = original(self, name, read)
        num_read += value.numel()
        return value

    monkeypatch.setattr(TensorFiles, "_read", count)
    cfg = load_pair(folder, source / "drafter", tp_size=2)
    pairs = plain.on_ranks(cfg.parallel, lambda groups: build(cfg, groups=groups))
    assert num_read == sum(p.numel() for pair in pairs for m in pair for p in m.parameters())
    expected = parts_by_name(whole)
    for pair in pairs:
        for name, (p, shard, experts) in parts_by_name(pair).items():
            theirs = expected[name][0]
            for part, of in zip(p, theirs, strict=True) if experts else [(p, theirs)]:
                pieces = [((slice(None),), (slice(None),))] if shard is None else list(shard.pieces())
                assert all(torch.equal(part[here], of[there]) for here, there in pieces), name


def test_a_misshapen_tensor_is_named_by_its_whole_shape(plain, tmp_path) -> None:
    shutil.copytree(PARITY / "qwen3_vanilla_b5", tmp_path / "pair")
    path = tmp_path / "pair" / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:80].clone()  # what one rank holds is not the whole
    save_file(tensors, path)
    cfg = load_pair(tmp_path / "pair" / "target", tmp_path / "pair" / "drafter", tp_size=2)
    with pytest.raises(LabError, match=r"lm_head\.weight has shape \[80, 64\] and must have \[160, 64\]"):
        plain.on_ranks(cfg.parallel, lambda groups: build(cfg, groups=groups))


# -- what is refused ---------------------------------------------------------------------------------------------


def test_ranks_that_are_not_there_are_refused() -> None:
    for toggles, said in (({"tp_size": 2}, "tp_size=2"), ({"ep_size": 2}, "ep_size=2")):
        with pytest.raises(LabError, match=f"{said} needs a process group of 2 ranks"):
            build(config(**toggles))


def test_a_model_without_its_tp_group_is_refused() -> None:
    group = ExpertGroup(parallel=ParallelConfig(tp_size=2), all_reduce=lambda t: None)
    with pytest.raises(LabError, match="tp_size=2 and a TP group of size 1"):
        Target(config().model.target, group, ONE_RANK)


def test_ranks_lie_as_documented() -> None:
    parallel = ParallelConfig(tp_size=4, ep_size=2)
    moe = SimpleNamespace(rank=2, size=4, all_reduce=lambda t: t)
    group = ExpertGroup.of(parallel, moe)
    assert (group.ep_rank, group.moe_tp_rank, group.num_ranks) == (1, 0, 4)
    with pytest.raises(LabError, match="moe_tp_rank=2 is not within 0 to 1"):
        replace(group, moe_tp_rank=2)
