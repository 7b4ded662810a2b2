"""``python -m dspark_kernels.sampling.bench [--json PATH]``: a draft drawn, and a block accepted, beside plain torch. Needs a GPU.

The floor is the bytes that must move: logits read, and of a draft the probabilities written; of a block the drafter's are read at one
place a request.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dspark_kernels.sampling import SamplingRows, chain_accept_logits, reference, sample
from dspark_kernels.timing import Row, graph_us, read_bandwidth, report

GAMMA = 5
CASES = ((32_000, 1), (32_000, 32), (151_936, 1), (151_936, 32))
"""Vocabulary, requests."""
CUTS: dict[str, tuple[int, float]] = {"no cut": (2**62, 1.0), "top_k 50": (50, 1.0), "top_p 0.9": (2**62, 0.9)}


def rows_of(batch: int, top_k: int, top_p: float) -> SamplingRows:
    whole = torch.ones(batch, device="cuda")
    return SamplingRows(
        temperature=whole, top_k=torch.full((batch,), top_k, device="cuda"), top_p=whole * top_p,
        is_greedy=whole < 0, all_greedy=False, cuts=top_k < 2**62 or top_p < 1,
    )  # fmt: skip


def case(vocab: int, batch: int, cut: str, bandwidth: float) -> list[Row]:
    """Both ops in both ways; two sets of logits take turns."""
    rows, shape = rows_of(batch, *CUTS[cut]), f"B {batch} γ {GAMMA} V {vocab}, {cut}"
    noise = torch.rand(batch, GAMMA + 1, 3, device="cuda", dtype=torch.float64)
    logits = [torch.randn(batch * (GAMMA + 1), vocab, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(2)]
    ones: list[tuple[Tensor, ...]] = [(x[:batch],) for x in logits]
    probs = torch.empty(batch, vocab, device="cuda")
    draft_probs = reference.probabilities(
        logits[0].view(batch, GAMMA + 1, vocab)[:, :GAMMA].float() + torch.randn(batch, GAMMA, vocab, device="cuda"),
        rows,
    )
    drafts = reference.draw(draft_probs, noise[:, :GAMMA, 0])
    lengths = torch.full((batch,), GAMMA, device="cuda")
    blocks: list[tuple[Tensor, ...]] = [(drafts, draft_probs, x) for x in logits]
    accepting = {"rows": rows, "lengths": lengths, "accept_noise": noise[:, :GAMMA, 1], "bonus_noise": noise[..., 2]}
    drawing = {"rows": rows, "noise": noise[:, 0, 0], "probs": probs}
    made = []
    for op, way, fn, sets, num_bytes in (
        ("sample", "kernels", partial(sample, **drawing), ones, ones[0][0].nbytes + probs.nbytes),
        ("sample", "torch", partial(reference.sample, **drawing), ones, ones[0][0].nbytes + probs.nbytes),
        ("chain_accept", "kernels", partial(chain_accept_logits, **accepting), blocks, logits[0].nbytes + probs.nbytes),
        ("chain_accept", "torch", partial(reference.chain_accept_logits, **accepting), blocks, logits[0].nbytes + probs.nbytes),
    ):  # fmt: skip
        p20, p50, p80 = graph_us(fn, sets, replays=10)
        made.append(
            Row(
                op=op, way=way, shape=shape, dtype="bfloat16", p20_us=p20, p50_us=p50, p80_us=p80,
                floor_us=num_bytes / bandwidth * 1e6,
            )
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    rows = [row for vocab, batch in CASES for cut in CUTS for row in case(vocab, batch, cut, bandwidth)]
    report(rows, bandwidth, args.json)


if __name__ == "__main__":
    main()
