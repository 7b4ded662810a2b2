"""Noise by name: the published test vectors, and nothing used twice."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.sampling.reference import philox, uniforms

VECTORS = [  # Random123's known answers for philox 4x32-10: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_known_answers(counter, key, words) -> None:
    made = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in made) == words


def test_a_round_draws_the_same_whatever_runs_beside_it() -> None:
    requests, anchors = torch.tensor([7, 2**40, 3]), torch.tensor([100, 5, 2**33])
    together = uniforms(11, requests, anchors, 6)
    for row in range(3):
        assert torch.equal(uniforms(11, requests[row : row + 1], anchors[row : row + 1], 6)[0], together[row])
        assert torch.equal(uniforms(11, requests[row : row + 1], anchors[row : row + 1], 2)[0], together[row, :2])


def test_nothing_is_used_twice() -> None:
    requests, anchors = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    noise = torch.cat([uniforms(seed, requests.flatten(), anchors.flatten(), 8).flatten() for seed in (0, 1, 2**32)])
    assert noise.min() > 0
    assert noise.max() < 1
    assert len(noise.unique()) > len(noise) - 8  # 28,800 draws of 2**32: two alike by chance in one of ten


def test_uniform_and_uncorrelated() -> None:
    noise = uniforms(5, torch.arange(20_000), torch.full((20_000,), 3), 2)
    count = torch.histc(noise.float().flatten(), bins=64, min=0, max=1)
    expected = noise.numel() / 64
    assert float(((count - expected) ** 2 / expected).sum()) < 110  # 63 degrees of freedom: 1 in 5000
    flat = noise.flatten(1)
    off = torch.corrcoef(flat.t()) - torch.eye(6)
    assert float(off.abs().max()) < 4.5 / 20_000**0.5
    follows = torch.corrcoef(torch.stack([flat[:-1, 0], flat[1:, 0]]))[0, 1]
    assert abs(float(follows)) < 4.5 / 20_000**0.5
