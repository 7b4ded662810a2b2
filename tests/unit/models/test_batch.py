"""The contract of a forward batch, field by field, without a synchronise."""

from dataclasses import replace

import pytest
import torch

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.errors import LabError
from dspark_lab.models.batch import ForwardMode
from dspark_lab.models.kvcache import KVCache

EP1, EP2 = ParallelConfig(), ParallelConfig(ep_size=2)


@pytest.fixture
def batch(plain):
    ids = torch.zeros(4, 5, dtype=torch.int64)
    return plain.batch_of(ids, torch.tensor([3, 4, 5, 0]), torch.arange(4), num_token_non_padded_cpu=15)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_legal_batches(batch, shape):
    batch.validate(EP1)
    batch.validate(EP2, mask_padding=False)
    replace(batch, num_token_non_padded=torch.full(shape, 15, dtype=torch.int32)).validate(EP2)
    replace(batch, forward_mode=ForwardMode.IDLE, num_token_non_padded_cpu=0).validate(EP1)
    zero = torch.zeros(shape, dtype=torch.int32)
    replace(batch, forward_mode=ForwardMode.IDLE, num_token_non_padded_cpu=0, num_token_non_padded=zero).validate(EP2)


@pytest.mark.parametrize(
    ("field", "value", "parallel", "message"),
    [
        ("input_ids", torch.zeros(15, dtype=torch.int64), EP1, r"input_ids has shape \(15,\)"),
        ("positions", torch.zeros(15, dtype=torch.int64), EP1, r"positions has shape \(15,\)"),
        ("key_limits", torch.zeros(4, 5, dtype=torch.int64), EP1, r"key_limits has shape \(4, 5\)"),
        ("req_slots", torch.zeros(3, dtype=torch.int64), EP1, r"req_slots has shape \(3,\)"),
        ("positions", torch.zeros(20, dtype=torch.int32), EP1, "positions has dtype torch.int32"),
        ("req_slots", torch.zeros(4, dtype=torch.int64, device="meta"), EP1, "req_slots is on meta"),
        ("max_keys", 0, EP1, "max_keys=0"),
        ("num_token_non_padded_cpu", 0, EP1, "num_token_non_padded_cpu=0"),
        ("num_token_non_padded_cpu", 21, EP1, "num_token_non_padded_cpu=21"),
        ("num_token_non_padded_cpu", -1, EP1, "num_token_non_padded_cpu=-1"),
        ("num_token_non_padded_cpu", 15.0, EP1, "num_token_non_padded_cpu=15.0"),
        ("num_token_non_padded", None, EP2, "num_token_non_padded is None and ep_size=2"),
        ("num_token_non_padded", torch.tensor(15), EP2, "num_token_non_padded has dtype torch.int64"),
        (
            "num_token_non_padded",
            torch.tensor([15, 15], dtype=torch.int32),
            EP2,
            r"num_token_non_padded has shape \(2,\)",
        ),
        (
            "num_token_non_padded",
            torch.tensor([[15]], dtype=torch.int32),
            EP2,
            r"num_token_non_padded has shape \(1, 1\)",
        ),
        (
            "num_token_non_padded",
            torch.zeros((), dtype=torch.int32, device="meta"),
            EP2,
            "num_token_non_padded is on meta",
        ),
        ("forward_mode", ForwardMode.IDLE, EP1, "IDLE"),
    ],
)
def test_misfits_are_named(batch, field, value, parallel, message):
    with pytest.raises(LabError, match=message):
        replace(batch, **{field: value}).validate(parallel)


def test_cache_keeps_requests_apart():
    cache = KVCache(2, 3, 8, 1, 4, torch.float32, "cpu")
    assert cache.dummy_slot == 3
    assert cache.num_bytes == 2 * 2 * 4 * 8 * 4 * 4
    before = [cache.checksum(s) for s in range(4)]
    k, v = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    cache.write(1, torch.tensor([1, 3]), torch.tensor([7, 0]), k, v)
    assert [cache.checksum(s) == old for s, old in enumerate(before)] == [True, False, True, False]
    read_k, read_v = cache.read(1, torch.tensor([3, 1]), 8)
    assert torch.equal(read_k[1, 7], k[0])
    assert torch.equal(read_v[0, 0], v[1])
    assert cache.read(1, torch.tensor([1]), 2)[0].shape == (1, 2, 1, 4)
    cache.reset()
    assert [cache.checksum(s) for s in range(4)] == before
