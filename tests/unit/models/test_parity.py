"""Target and drafter against what DeepSpec computed from the same files: rounds 1 and 3, with plain steps between.

Two checkpoints were given; ``tests/bench/make_parity.py`` made the others: every head, γ 4 to 8, the embedding layer, confidences of each kind.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_lab.config.parts import ParallelConfig
from dspark_lab.ep.groups import ParallelGroups
from dspark_lab.models.checkpoint import load_pair
from dspark_lab.models.weights import build

PARITY = Path(__file__).parents[2] / "data" / "parity"
TOLERANCE = 1e-4


class Rounds:
    """One request, greedy, without an engine."""

    def __init__(self, folder: Path, plain, groups: ParallelGroups, **toggles) -> None:
        cfg = load_pair(folder / "target", folder / "drafter", **toggles)
        self.plain, self.layers = plain, cfg.model.drafter.target_layer_ids
        self.target, self.drafter = build(cfg, groups=groups)
        self.target_cache, self.cache = self.target.new_cache(1, 128), self.drafter.new_cache(1, 128)
        self.slot = torch.tensor([0])

    def verify(self, tokens: list[int], start: int):
        """Logits [n, V] and the aux rows of ``tokens`` from position ``start``."""
        batch = self.plain.batch_of(torch.tensor([tokens]), torch.tensor([start]), self.slot)
        out = self.target(batch, self.target_cache, capture_layers=self.layers)
        return self.target.logits(out.hidden), out.aux

    def commit(self, aux: torch.Tensor, start: int) -> None:
        n = aux.shape[0]
        self.drafter.write_context(aux, self.slot.expand(n), torch.arange(start, start + n), self.cache)

    def propose(self, anchor: int, seq_len: int):
        gamma = self.drafter.block_size
        ids = torch.tensor([[anchor] + [self.drafter.mask_token_id] * (gamma - 1)])
        hidden = self.drafter(self.plain.batch_of(ids, torch.tensor([seq_len]), self.slot, block=True), self.cache)
        proposal = self.drafter.propose(hidden, torch.tensor([anchor]))
        gather = self.drafter.vocab.gather
        corrected = gather(proposal.corrected_logits)
        return hidden, replace(proposal, base_logits=gather(proposal.base_logits), corrected_logits=corrected)


def replay(r: Rounds, case: dict, threshold: float):
    """Tensors of each round by name; the lengths; the tokens."""
    logits, aux = r.verify(case["prompt"], 0)
    yield_first = {"target_logits": logits[None]}
    seq_len, anchor, new_context = len(case["prompt"]), int(logits[-1].argmax()), aux
    r.commit(aux, 0)
    tokens, rounds, accepts, proposals = [*case["prompt"], anchor], [], [], []
    while seq_len < len(case["prompt"]) + 48:
        hidden, p = r.propose(anchor, seq_len)
        proposed = {k: v for k in PROPOSED if (v := getattr(p, k)) is not None}
        rounds.append({"target_hidden": new_context[None], "block_hidden": hidden, **proposed})
        below = [] if p.confidence is None else (p.confidence[0] < threshold).nonzero()
        length = int(below[0]) if len(below) else r.drafter.block_size
        drafts = p.draft_tokens[0, :length].tolist()
        logits, aux = r.verify([anchor, *drafts], seq_len)
        best = logits.argmax(-1).tolist()
        accepted = next((i for i, d in enumerate(drafts) if d != best[i]), length)
        new_context = aux[: accepted + 1]
        r.commit(new_context, seq_len)
        tokens += [*drafts[:accepted], best[accepted]]
        seq_len, anchor = seq_len + accepted + 1, best[accepted]
        accepts.append(accepted + 1)
        proposals.append(length)
    return yield_first, rounds, accepts, proposals, tokens


PROPOSED = ("base_logits", "corrected_logits", "draft_tokens", "confidence")


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "toggles"),
    [
        ("qwen3_vanilla_b5", {}),
        ("qwen3_vanilla_b5", {"tp_size": 2}),
        ("qwen3moe_vanilla_b7", {}),
        ("qwen3moe_vanilla_b7", {"tp_size": 2}),
        ("qwen3moe_vanilla_b7", {"tp_size": 2, "ep_size": 2, "mask_padding": False}),
        ("qwen3_gated_b4", {}),
        ("qwen3_gated_b4", {"tp_size": 2}),
        ("qwen3_rnn_b8", {}),
        ("qwen3_rnn_b8", {"tp_size": 2}),
        ("qwen3_rank0_b6", {}),
        ("qwen3_vanilla_b6", {}),
        ("qwen3moe_gated_b8", {}),
        ("qwen3moe_rnn_b4", {}),
        ("qwen3moe_rnn_b4", {"tp_size": 2, "ep_size": 2, "mask_padding": False}),
        ("qwen3moe_rank0_b8", {}),
        ("qwen3moe_rank0_b8", {"tp_size": 2, "ep_size": 2, "mask_padding": False}),
    ],
)
def test_parity(name, toggles, index, plain, record_property):
    folder = PARITY / name
    spec = json.loads((folder / "cases.json").read_text())
    case, expected = spec["cases"][index], load_file(folder / "expected.safetensors")

    def work(groups: ParallelGroups):
        return replay(Rounds(folder, plain, groups, **toggles), case, spec["confidence_threshold"])

    parallel = {k: v for k, v in toggles.items() if k != "mask_padding"}
    ranks = plain.on_ranks(ParallelConfig(**parallel), work)
    assert all(rank[2:] == ranks[0][2:] for rank in ranks)
    first, rounds, accepts, proposals, tokens = ranks[-1]
    got = {**first, **rounds[0], **{f"round3.{k}": v for k, v in rounds[2].items()}}
    wanted = {k.removeprefix(f"case{index}."): v for k, v in expected.items() if k.startswith(f"case{index}.")}
    assert sorted(got) == sorted(wanted)
    for key, value in wanted.items():
        assert got[key].shape == value.shape, key
        if key.endswith("draft_tokens"):
            assert torch.equal(got[key], value), key
            continue
        difference = (got[key] - value).abs().max().item()
        record_property(key, difference)
        assert difference < TOLERANCE, key
    assert accepts == case["acceptance_lengths"]
    assert proposals == case["proposal_lengths"]
    assert tokens[: len(case["output"])] == case["output"]


def test_parity_can_fail(plain):
    """A context one position off gives other hidden states: the tolerance tells them apart."""
    folder = PARITY / "qwen3_vanilla_b5"
    case = json.loads((folder / "cases.json").read_text())["cases"][0]
    expected = load_file(folder / "expected.safetensors")
    r = Rounds(folder, plain, ParallelGroups())
    logits, aux = r.verify(case["prompt"], 0)
    r.commit(aux, 1)
    hidden, _ = r.propose(int(logits[-1].argmax()), len(case["prompt"]))
    assert (hidden - expected["case0.block_hidden"]).abs().max() > 100 * TOLERANCE
