"""A round's sampling, calibration and split keep the host running: on the fake device nothing waits, and values are the CPU's."""

from __future__ import annotations

import torch

from dspark_kernels.sampling.reference import (
    ACCEPT,
    BONUS,
    DRAFT,
    SamplingRows,
    chain_accept,
    draw,
    probabilities,
    uniforms,
)
from dspark_lab.guards import fake_cuda, no_host_sync
from dspark_lab.spec.confidence import calibrated
from dspark_lab.spec.sampling import Sampling, sampling_rows
from dspark_lab.spec.split import split_budget

B, GAMMA, V = 3, 4, 7


def one_round(inputs: dict[str, torch.Tensor], rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    confidence = calibrated(inputs["confidence"], inputs["scales"])
    lengths = split_budget(confidence, inputs["budget"], is_real=inputs["is_real"])
    noise = uniforms(5, inputs["requests"], inputs["anchors"], GAMMA + 1)
    p_d, p_t = probabilities(inputs["draft"], rows), probabilities(inputs["target"], rows)
    drafts = draw(p_d, noise[:, :GAMMA, DRAFT])
    return chain_accept(drafts, p_d, p_t, lengths, accept_noise=noise[:, :GAMMA, ACCEPT], bonus_noise=noise[..., BONUS])


def test_nothing_waits_for_the_device() -> None:
    g = torch.Generator().manual_seed(0)
    inputs = {
        "confidence": torch.rand(B, GAMMA, generator=g),
        "scales": torch.rand(GAMMA, generator=g) + 0.5,
        "budget": torch.tensor([7]),
        "is_real": torch.tensor([True, True, False]),
        "requests": torch.arange(B),
        "anchors": torch.tensor([9, 4, 0]),
        "draft": torch.randn(B, GAMMA, V, generator=g),
        "target": torch.randn(B, GAMMA + 1, V, generator=g),
    }
    settings = [Sampling(temperature=0), Sampling(temperature=0.9, top_k=4, top_p=0.8), Sampling()]
    wanted = one_round(inputs, sampling_rows(settings))
    with torch.inference_mode(), fake_cuda() as device:
        there = {name: x.to(device) for name, x in inputs.items()}
        rows = sampling_rows(settings, device)
        with no_host_sync():
            made = one_round(there, rows)
        made = [x.cpu() for x in made]
    for ours, theirs in zip(made, wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert int(wanted[0][2]) == 0  # a padded row verifies nothing
