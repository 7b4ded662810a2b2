"""Tokens a second of one generation: DSpark, the same engine without drafts, and transformers: ``python tests/bench/generation.py --help``.

The same shapes and random weights of the preset, prompt and number of new tokens in each way; prefills are left out. Every figure is
of a process of its own, the ways take turns; ratios are of the same turn, with a 95 % interval over turns. DSpark's acceptance is
the preset's (simulated where its weights are random). ``transformers`` is its eager ``generate``, timed from its first new token to its
last; it is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_lab.analysis.intervals import Interval, t_interval
from dspark_lab.config import LabConfig, preset
from dspark_lab.errors import LabError

WAYS = ("dspark", "plain", "transformers")


@torch.inference_mode()
def ours(cfg: LabConfig, num_tokens: int) -> dict[str, Any]:
    """One request at a time: seconds from the first token of its prefill to ``num_tokens`` more, and how many rounds those took."""
    from dspark_lab.device import resolve, synchronize
    from dspark_lab.engine.decode import DecodeEngine
    from dspark_lab.engine.request import Request
    from dspark_lab.models.weights import build

    device = resolve(cfg.engine.device)
    engine = DecodeEngine(cfg, *build(cfg, device), device)
    seconds, done = 0.0, Request(prompt=[1], max_new_tokens=1)
    for _ in range(2):  # the first one warms up
        engine.reset()
        done = Request(prompt=[t % 1000 + 1 for t in range(cfg.engine.prompt_len)], max_new_tokens=num_tokens)
        engine.join(done)
        synchronize(device)
        start = time.perf_counter()
        while engine.any_active():
            engine.step()
        engine.drain()
        seconds = time.perf_counter() - start
    lengths = done.acceptance_lengths
    made = sum(lengths)  # the prefill's token is not among them
    return {
        "tokens_per_s": made / seconds,
        "accept_length": made / len(lengths),
        "round_ms": 1e3 * seconds / len(lengths),
    }


def theirs(cfg: LabConfig, num_tokens: int) -> dict[str, Any]:
    """transformers' greedy ``generate`` of the same target, eager, bfloat16 or float32 as the config says."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, StoppingCriteria

    from dspark_lab.device import resolve
    from dspark_lab.models.weights import DTYPES

    t = cfg.model.target
    shape = {k: v for k, v in vars(t).items() if k not in ("rope_theta", "mlp_only_layers", "decoder_sparse_step")}
    shape |= {"max_position_embeddings": cfg.model.context_len, "rope_parameters": {"rope_type": "default", "rope_theta": t.rope_theta}}  # fmt: skip
    torch.set_default_dtype(DTYPES[cfg.model.dtype])
    with resolve(cfg.engine.device):
        if t.num_experts:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()

    class Clock(StoppingCriteria):
        """Looks at each new token, and stops nothing."""

        def __init__(self) -> None:
            self.at: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.at.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor([[i % 1000 + 1 for i in range(cfg.engine.prompt_len)]], device=model.device)
    clock = Clock()
    for tokens in (8, num_tokens + 1):  # the first one warms up
        clock.at.clear()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            stopping_criteria=[clock], pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    seconds = clock.at[-1] - clock.at[0]
    return {
        "tokens_per_s": (len(clock.at) - 1) / seconds,
        "accept_length": 1.0,
        "round_ms": 1e3 * seconds / (len(clock.at) - 1),
        "experts": str(getattr(model.config, "_experts_implementation", "")),
        "attention": str(model.config._attn_implementation),
    }


def config_of(args: argparse.Namespace, way: str) -> LabConfig:
    cfg = preset(args.preset, device=args.device, batch_size=1, alloc="on_demand")
    graph = args.device == "cuda"
    cfg = cfg.replace(use_graph=graph, overlap=graph, speculate=way == "dspark", max_new_tokens=args.tokens + 1)
    return cfg.replace(buckets=[1])


def measured(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """One way in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(turns: list[dict[str, dict[str, Any]]]) -> list[str]:
    lines = [f"{'way':14}{'tokens/s':>10}{'tokens a step':>15}{'ms a step':>11}   over it, DSpark is [95 %]"]
    for way in turns[0]:
        of = {k: float(np.median([t[way][k] for t in turns])) for k in ("tokens_per_s", "accept_length", "round_ms")}
        ratios = t_interval(
            np.log([t["dspark"]["tokens_per_s"] / t[way]["tokens_per_s"] for t in turns if "dspark" in t])
        )
        lines.append(
            f"{way:14}{of['tokens_per_s']:10.1f}{of['accept_length']:15.3f}{of['round_ms']:11.3f}   {_said(way, ratios)}"
        )
    both = [t for t in turns if {"dspark", "plain"} <= t.keys()]
    if both:
        d, p = ([t[w] for t in both] for w in ("dspark", "plain"))
        even = np.mean([x["round_ms"] / y["round_ms"] for x, y in zip(d, p, strict=True)])
        lines.append(f"break-even accept length: {even:.2f}")
    return lines


def _said(way: str, ratios: Interval) -> str:
    """How much faster DSpark is: of one turn without an interval, and of nothing where it was not among the ways."""
    if way == "dspark" or not ratios.n:
        return ""
    said = f"{np.exp(ratios.mean):.2f} ×"
    return f"{said} [{np.exp(ratios.low):.2f}, {np.exp(ratios.high):.2f}]" if ratios.known else f"{said} (one turn)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens after the prefill's")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        run = theirs if args.way == "transformers" else ours
        print(json.dumps(run(config_of(args, args.way), args.tokens)))
        return
    for name, at_least in (("tokens", 1), ("turns", 1)):
        if getattr(args, name) < at_least:
            parser.error(f"--{name} is at least {at_least}.")
    if strange := set(args.ways.split(",")) - {*WAYS}:
        parser.error(f"--ways knows {', '.join(WAYS)}, not {', '.join(sorted(strange))}.")
    try:
        config_of(args, "dspark")
    except LabError as e:
        parser.error(str(e))
    ways = [w for w in args.ways.split(",") if w != "transformers" or find_spec("transformers")]
    turns = [{way: measured(args, way) for way in (ways if i % 2 == 0 else ways[::-1])} for i in range(args.turns)]
    print("\n".join(table(turns)))
    if args.json:
        args.json.write_text(
            json.dumps({"preset": args.preset, "device": args.device, "tokens": args.tokens, "turns": turns})
        )


if __name__ == "__main__":
    main()
