"""MoE layers against a slow dense loop, padded rows that hold anything, and ranks put together in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.moe import MoE
from dspark_lab.models.weights import init_random


def reference_moe(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """One row and one expert at a time; all experts must be in ``moe``."""
    out = torch.zeros_like(x)
    probs = (x @ moe.gate.weight.T).float().softmax(-1)
    for row in range(x.shape[0]):
        best = probs[row].sort(descending=True, stable=True).indices[: moe.gate.topk]
        weights = probs[row, best] / (probs[row, best].sum() if moe.gate.norm_topk_prob else 1.0)
        for weight, e in zip(weights, best, strict=True):
            gate, up = (moe.experts.gate_up_proj[e] @ x[row]).chunk(2)
            out[row] += weight * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
    return out


def share(_tensor):
    """Leaves each rank its own share, to be added up by the test."""


def ranks(plain, ep_size, cfg, **group):
    parallel = ParallelConfig(ep_size=ep_size, placement=group.pop("placement", "contiguous"))
    for rank in range(ep_size):
        moe = MoE(cfg, ExpertGroup(parallel=parallel, ep_rank=rank, all_reduce=share, **group))
        init_random(moe, 3)
        yield moe


def rows(plain, n, real=None, scalar=True):
    batch = plain.batch_of(torch.zeros(n, 1, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), torch.arange(n))
    real = n if real is None else real
    return replace(
        batch,
        num_token_non_padded_cpu=real,
        num_token_non_padded=torch.tensor(real, dtype=torch.int32) if scalar else None,
    )


# An inner size of 10 has no strides of 16 bytes: the grouped product refuses it and the dense way runs.
@pytest.mark.parametrize(
    "changes", [{}, {"norm_topk_prob": False}, {"moe_intermediate_size": 10}, {"num_experts_per_tok": 8}]
)
def test_layer_equals_the_slow_loop(changes, plain):
    cfg = plain.decoder_config(**changes)
    (moe,) = ranks(plain, 1, cfg)
    assert moe.experts._groups() is (cfg.moe_intermediate_size % 4 == 0)
    x = torch.randn(23, 32)
    assert (moe(x, rows(plain, 23, scalar=False)) - reference_moe(moe, x)).abs().max() < 1e-5


@pytest.mark.parametrize("inner", [16, 10], ids=["grouped", "dense"])
@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_ranks_add_up_to_one(ep_size, placement, inner, plain):
    cfg = plain.decoder_config(moe_intermediate_size=inner)
    (whole,) = ranks(plain, 1, cfg)
    parts = list(ranks(plain, ep_size, cfg, placement=placement))
    x, real = torch.randn(12, 32), 9
    y = sum(moe(x, rows(plain, 12, real)) for moe in parts)
    assert (y[:real] - whole(x, rows(plain, 12))[:real]).abs().max() < 1e-5
    assert (y[real:] == 0).all()
    assert sum(m.num_bytes for m in parts) == whole.num_bytes


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("inner", [16, 10], ids=["grouped", "dense"])
def test_padded_rows_hold_anything(inner, garbage, plain):
    cfg = plain.decoder_config(moe_intermediate_size=inner)
    for moe in ranks(plain, 2, cfg):
        clean = torch.randn(12, 32)
        dirty = clean.clone()
        dirty[7:] = garbage
        a, b = moe(clean, rows(plain, 12, 7)), moe(dirty, rows(plain, 12, 7))
        assert torch.equal(a[:7], b[:7])
        assert (b[7:] == 0).all()


def test_idle_rank_gives_zeros(plain):
    for moe in ranks(plain, 2, plain.decoder_config()):
        batch = replace(rows(plain, 4, 0), forward_mode=ForwardMode.IDLE)
        batch.validate(ParallelConfig(ep_size=2))
        assert (moe(torch.full((4, 32), float("nan")), batch) == 0).all()


def test_mask_compiled_out_computes_padding(plain):
    x = torch.randn(6, 32)
    parts = list(ranks(plain, 2, plain.decoder_config(), mask_padding=False))
    (whole,) = ranks(plain, 1, plain.decoder_config())
    y = sum(moe(x, rows(plain, 6, 2, scalar=False)) for moe in parts)
    assert (y - whole(x, rows(plain, 6))).abs().max() < 1e-5


class Poison(torch.Tensor):
    """A scalar that no operation may touch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"the device scalar was read by {func}")


def test_one_rank_never_reads_the_scalar(plain):
    poison = torch.zeros((), dtype=torch.int32).as_subclass(Poison)
    cfg = plain.decoder_config()
    (moe,) = ranks(plain, 1, cfg)
    x = torch.randn(5, 32)
    batch = rows(plain, 5, 2, scalar=False)
    poisoned = replace(batch, num_token_non_padded=poison)
    assert torch.equal(moe(x, poisoned), moe(x, batch))
    two = next(ranks(plain, 2, cfg))
    with pytest.raises(AssertionError, match="device scalar was read"):
        two(x, poisoned)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_whole_models_over_ranks(ep_size, plain):
    cfg = plain.model_config()
    ids = torch.randint(0, 63, (3, 9))
    block = torch.full((3, 4), 63)
    anchors = torch.tensor([5, 6, 7])
    block[:, 0] = anchors

    def forward(group, real):
        target, drafter = Target(cfg.target, group), Drafter(cfg, group)
        init_random(target, 1)
        init_random(drafter, 2)
        target_cache, cache = target.new_cache(3, 32), drafter.new_cache(3, 32)
        slots = torch.tensor([0, 1, 3])[:3]
        batch = plain.batch_of(ids, torch.zeros(3, dtype=torch.int64), slots)
        batch = replace(
            batch,
            num_token_non_padded_cpu=real * 9,
            num_token_non_padded=torch.tensor([real * 9], dtype=torch.int32),
        )
        got = target(batch, target_cache, capture_layers=cfg.drafter.target_layer_ids)
        drafter.write_context(got.aux, batch.token_slots, batch.positions, cache)
        draft = plain.batch_of(block, torch.full((3,), 9), slots, block=True)
        draft = replace(
            draft,
            num_token_non_padded_cpu=real * 4,
            num_token_non_padded=torch.tensor([real * 4], dtype=torch.int32),
        )
        load = drafter.watch_load()
        proposal = drafter.propose(drafter(draft, cache), anchors)
        return (
            target.logits(got.hidden).view(3, 9, -1)[:real],
            proposal.corrected_logits[:real],
            load.report(),
        )

    parallel = ParallelConfig(ep_size=ep_size)
    one = forward(ExpertGroup(), 2)
    many = plain.on_ranks(parallel, lambda groups: forward(ExpertGroup.of(parallel, groups.moe), 2))
    for rank in range(ep_size):
        assert (many[rank][0] - one[0]).abs().max() < 1e-4
        assert (many[rank][1] - one[1]).abs().max() < 1e-4
        assert torch.equal(many[rank][0], many[0][0])
    for layer in range(2):
        assert sum(sum(many[r][2]["rows"][layer]) for r in range(ep_size)) == 2 * 4 * 2
    assert many[0][2]["bytes_sent"] == round(2 * 12 * 32 * 4 * 2 * (ep_size - 1) / ep_size)
    assert one[2]["bytes_sent"] == 0


def test_padded_requests_leave_real_ones_alone(plain):
    cfg = plain.decoder_config()
    group = ExpertGroup(parallel=ParallelConfig(ep_size=2), all_reduce=share)
    target = Target(cfg, group)
    init_random(target, 1)
    outs = []
    for garbage in (0.0, float("nan")):
        target.model.embed_tokens.weight[63] = garbage
        cache = target.new_cache(2, 16)
        ids = torch.randint(0, 60, (4, 5), generator=torch.Generator().manual_seed(0))
        ids[2:] = 63
        slots = torch.tensor([0, 1, cache.dummy_slot, cache.dummy_slot])
        batch = plain.batch_of(ids, torch.tensor([0, 3, 0, 0]), slots, num_token_non_padded_cpu=10)
        batch = replace(batch, num_token_non_padded=torch.tensor(10, dtype=torch.int32))
        outs.append((target(batch, cache).hidden[:10], cache.checksum(0), cache.checksum(1)))
    assert torch.equal(outs[0][0], outs[1][0])
    assert outs[0][1:] == outs[1][1:]
    assert outs[0][0].isfinite().all()


def test_ep_without_a_group_is_refused():
    from dspark_lab.config.presets import preset
    from dspark_lab.models.weights import build

    with pytest.raises(LabError, match="ep_size=2 needs a process group"):
        build(preset("tiny", ep_size=2))
