"""The losses against loops written from the formulas, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_lab.spec.loss import LossWeights, dspark_loss


def by_hand(draft, target, labels, mask, confidence, w: LossWeights) -> torch.Tensor:
    """One slot at a time, in float64; c* does not carry a gradient."""
    sums, mass = {"ce": 0.0, "l1": 0.0, "bce": 0.0}, 0.0
    for b in range(draft.shape[0]):
        for a in range(draft.shape[1]):
            for k in range(draft.shape[2]):
                if not mask[b, a, k]:
                    continue
                weight = math.exp(-k / w.decay)
                exp_d, exp_t = draft[b, a, k].exp(), target[b, a, k].exp()
                p_d, p_t = exp_d / exp_d.sum(), exp_t / exp_t.sum()
                distance = sum((p_d[v] - p_t[v]).abs() for v in range(len(p_d)))
                accept = 1 - distance.detach() / 2
                c = 1 / (1 + (-confidence[b, a, k]).exp())
                sums["ce"] += weight * -p_d[labels[b, a, k]].log()
                sums["l1"] += weight * distance
                sums["bce"] += weight * -(accept * c.log() + (1 - accept) * (1 - c).log())
                mass += weight
    terms = [w.ce * sums["ce"], w.l1 * sums["l1"], w.confidence * sums["bce"]]
    return sum(terms) / (mass + 1e-6)


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(ce=1.0, l1=0.0, confidence=0.3, decay=7.0)])
def test_values_and_gradients(weights):
    torch.manual_seed(0)
    shape = (2, 3, 4)
    draft = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    confidence = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    target, labels = torch.randn(*shape, 6, dtype=torch.float64), torch.randint(0, 6, shape)
    mask = torch.arange(4) < torch.tensor([[4, 2, 0], [1, 4, 3]])[..., None]
    wanted = by_hand(draft, target, labels, mask, confidence, weights)
    grads = torch.autograd.grad(wanted, (draft, confidence))
    got = dspark_loss(draft, target, labels, mask, confidence, weights).total
    assert abs(float(got.detach()) - float(wanted.detach())) < 1e-6
    for ours, theirs in zip(torch.autograd.grad(got, (draft, confidence)), grads, strict=True):
        assert (ours - theirs).abs().max() < 1e-7


def test_accept_length_is_one_plus_survivals():
    draft = torch.zeros(1, 1, 3, 2)
    target = torch.tensor([0.75, 0.25]).log().expand(1, 1, 3, 2)  # c* = 0.75 in every slot
    mask = torch.tensor([[[True, True, False]]])
    loss = dspark_loss(draft, target, torch.zeros(1, 1, 3, dtype=torch.int64), mask, None)
    assert float(loss.accept_length) == pytest.approx(1 + 0.75 + 0.75**2, abs=1e-5)
    assert float(loss.confidence) == 0.0


def test_a_batch_without_anchors_gives_zero():
    empty = torch.zeros(1, 2, 3, dtype=torch.bool)
    logits = torch.randn(1, 2, 3, 5, requires_grad=True)
    loss = dspark_loss(logits, torch.randn(1, 2, 3, 5), torch.zeros(1, 2, 3, dtype=torch.int64), empty, None)
    loss.total.backward()
    assert float(loss.total.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()
