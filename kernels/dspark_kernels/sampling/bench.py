"""``python -m dspark_kernels.sampling.bench [--json PATH]``: a draft drawn, and a block accepted, beside plain torch. Needs a GPU.

The floor is the bytes that must move: logits read, and of a draft the probabilities written; of a block the drafter's are read at one
place a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dspark_kernels.sampling import SamplingRows, chain_accept_logits, reference, sample
from dspark_kernels.timing import Row, bench_main, graph_us

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


def compare(bandwidth: float) -> list[Row]:
    table = []
    for vocab, batch in CASES:
        target = torch.randn(batch * (GAMMA + 1), vocab, device="cuda", dtype=torch.bfloat16) * 3
        drafted = target.view(batch, GAMMA + 1, vocab)[:, :GAMMA].float() + torch.randn(
            batch, GAMMA, vocab, device="cuda"
        )
        noise = torch.rand(batch, GAMMA + 1, 3, device="cuda", dtype=torch.float64)
        lengths = torch.full((batch,), GAMMA, device="cuda")
        for name, (top_k, top_p) in CUTS.items():
            rows = rows_of(batch, top_k, top_p)
            probs = reference.probabilities(drafted, rows)
            drafts = reference.draw(probs, noise[:, :GAMMA, 0])
            out = torch.empty(batch, vocab, device="cuda")

            def drawn(fn: Callable[..., Any], x: Any, rows: Any = rows, out: Any = out, noise: Any = noise) -> Any:
                return fn(x, rows, noise[:, 0, 0], out)

            def accepted(fn: Callable[..., Any], x: Any, rows: Any = rows, of: Any = (drafts, probs, noise)) -> Any:
                drafts, probs, noise = of
                return fn(drafts, probs, x, rows, lengths, accept_noise=noise[:, :GAMMA, 1], bonus_noise=noise[..., 2])

            one = target.view(batch, GAMMA + 1, vocab)[:, 0].contiguous()
            for op, call, ours, theirs, x, num_bytes in (
                ("sample", drawn, sample, reference.sample, one, one.nbytes + out.nbytes),
                ("chain_accept", accepted, chain_accept_logits, reference.chain_accept_logits, target, target.nbytes + out.nbytes),
            ):  # fmt: skip
                for way, fn in (("kernels", ours), ("torch", theirs)):
                    p20, p50, p80 = graph_us(lambda x, call=call, fn=fn: call(fn, x), [(x,), (x.clone(),)], replays=10)
                    table.append(
                        Row(
                            op=op, way=way, shape=f"B {batch} V {vocab} {name}", dtype="bfloat16",
                            p20_us=p20, p50_us=p50, p80_us=p80, floor_us=num_bytes / bandwidth * 1e6,
                        )
                    )  # fmt: skip
    return table


if __name__ == "__main__":
    bench_main(__doc__, compare)
