"""Tokens a second of our decode loop over DeepSpec's evaluation loop: ``python tests/bench/loops.py --deepspec PATH --help``.

The same weights, prompts and number of new tokens, batch 1, whole generations, prefill included. In each process both loops have
their models loaded and take turns prompt by prompt; a process gives one ratio (all tokens over all seconds, ours over theirs), and
the interval is of 95 % over processes. Theirs runs as its evaluator runs it (sdpa, hidden states of every layer, confidence of every
block); its recorder of confidences stays off. Nothing is simulated: accepted lengths are what the two loops accept.

Shapes: ``shipped`` (the trained pair under ``data/models``, held-out prompts of three kinds), ``4b`` (Qwen3-4B's shape and a
drafter of 5 layers, γ 7, rank 256; synthetic weights made here, of a target whose next token is a function of the last and a
drafter that knows it for 80 % of tokens), ``thin`` (as ``4b``, small enough for any CPU: it tests this script).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspec_loop import Loop, check_checkout, import_deepspec

from dspark_lab.analysis.intervals import t_interval
from dspark_lab.config import LabConfig
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, EngineConfig, ModelConfig
from dspark_lab.errors import LabError

MODELS = Path(__file__).parents[2] / "data" / "models"
SHAPES = ("shipped", "4b", "thin")
KINDS = ("arithmetic", "code", "prose")


class Done(NamedTuple):
    """One generation."""

    seconds: float
    output: list[int]
    accepts: list[int]


class Result(NamedTuple):
    """One process."""

    ours: dict[str, float]
    theirs: dict[str, float]
    equal: int
    """Prompts of which both made the same tokens."""
    prompts: int
    load_s: float
    """Imports, models, graphs and the prompts that warm up."""


Way = Callable[[list[int]], Done]


def config_of(args: argparse.Namespace) -> LabConfig:
    """The pair and how our engine runs it. Raises `LabError`."""
    graph = args.device == "cuda"
    toggles: dict[str, Any] = {
        "device": args.device, "batch_size": 1, "buckets": [1], "use_graph": graph, "overlap": graph, "max_new_tokens": args.tokens,
    }  # fmt: skip
    if args.temperature:
        toggles["temperature"] = args.temperature
    if args.dtype:
        toggles["dtype"] = args.dtype
    if args.shape == "shipped":
        from dspark_lab.models.checkpoint import load_pair

        return load_pair(MODELS / "target", MODELS / args.drafter, **toggles)
    return synthetic(args.shape, args.tokens).replace(**toggles)


def synthetic(shape: str, tokens: int) -> LabConfig:
    """Qwen3-4B's shape with the drafter that was published for it (output head of its own), or a thin one of the same make."""
    big = shape == "4b"
    target = DecoderConfig(
        vocab_size=151_936 if big else 512,
        hidden_size=2560 if big else 64,
        num_hidden_layers=36 if big else 6,
        num_attention_heads=32 if big else 4,
        num_key_value_heads=8 if big else 2,
        head_dim=128 if big else 16,
        intermediate_size=9728 if big else 96,
        rope_theta=1_000_000.0,
    )
    drafter = DrafterConfig(
        block_size=7,
        target_layer_ids=(1, 9, 17, 25, 33) if big else (1, 2, 3),
        mask_token_id=151_669 if big else 511,
        markov_rank=256 if big else 48,
    )
    draft = DecoderConfig(**{**target.__dict__, "num_hidden_layers": 5 if big else 2})
    model = ModelConfig(
        target=target, draft=draft, drafter=drafter, weights="bigram", dtype="bfloat16", context_len=512 + tokens
    )
    return LabConfig(preset=f"loops-{shape}", model=model, engine=EngineConfig(max_new_tokens=tokens))


def prompts_of(args: argparse.Namespace, cfg: LabConfig) -> list[list[int]]:
    """``--prompts`` of each kind of held-out text, or as many of random tokens."""
    if args.shape == "shipped":
        texts = [
            json.loads(line)["turns"][0].encode()
            for kind in KINDS
            for line in (MODELS / "held_out" / f"{kind}.jsonl").read_text().splitlines()[: args.prompts]
        ]
        return [list(text[-args.prompt_len :]) for text in texts]
    made = torch.Generator().manual_seed(1)
    vocab = min(cfg.model.target.vocab_size, cfg.model.drafter.mask_token_id)
    return torch.randint(vocab, (args.prompts, args.prompt_len), generator=made).tolist()


def ours(cfg: LabConfig, models: tuple[Any, Any]) -> Way:
    from dspark_lab.device import resolve, synchronize
    from dspark_lab.engine.decode import DecodeEngine
    from dspark_lab.engine.request import Request

    device = resolve(cfg.engine.device)
    engine = DecodeEngine(cfg, *models, device)

    def generate(prompt: list[int]) -> Done:
        engine.reset()
        request = Request(prompt=prompt, max_new_tokens=cfg.engine.max_new_tokens)
        synchronize(device)
        start = time.perf_counter()
        engine.join(request)
        while engine.any_active():
            engine.step()
        engine.drain()
        return Done(time.perf_counter() - start, request.tokens, request.acceptance_lengths)

    return generate


def theirs(args: argparse.Namespace, cfg: LabConfig, models: tuple[Any, Any]) -> Way:
    from dspark_lab.device import resolve, synchronize

    device = resolve(cfg.engine.device)
    target, drafter = read_pair(args, cfg, device) if args.shape == "shipped" else copied_pair(cfg, device, models)
    if args.experts and cfg.model.target.num_experts:
        target.set_experts_implementation(args.experts)
    loop = Loop(
        args.deepspec, target, drafter, max_new_tokens=cfg.engine.max_new_tokens, temperature=cfg.engine.temperature
    )

    def generate(prompt: list[int]) -> Done:
        synchronize(device)
        start = time.perf_counter()
        out = loop.generate(prompt)
        synchronize(device)
        return Done(time.perf_counter() - start, out.output_ids[0].tolist(), out.acceptance_lengths)

    return generate


def read_pair(args: argparse.Namespace, cfg: LabConfig, device: torch.device) -> tuple[Any, Any]:
    """The shipped checkpoints by their own loaders."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"dtype": getattr(torch, cfg.model.dtype), "attn_implementation": "sdpa"}
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", **how).to(device).eval()
    return target, Qwen3DSparkModel.from_pretrained(MODELS / args.drafter, **how).to(device).eval()


@torch.no_grad()
def copied_pair(cfg: LabConfig, device: torch.device, models: tuple[Any, Any]) -> tuple[Any, Any]:
    """Their modules with our weights: tensors have the same names."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    d = cfg.model.drafter

    def config(part: DecoderConfig, **more: Any) -> Any:
        names = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
        shape = {k: getattr(part, k) for k in (*names, "intermediate_size", "rms_norm_eps", "tie_word_embeddings")}
        rope = {"rope_type": "default", "rope_theta": part.rope_theta}
        made = Qwen3Config(**shape, rope_parameters=rope, max_position_embeddings=cfg.model.context_len, **more)
        made._attn_implementation = "sdpa"
        return made

    heads: dict[str, Any] = {
        "block_size": d.block_size, "mask_token_id": d.mask_token_id, "target_layer_ids": list(d.target_layer_ids), "num_anchors": 1,
        "markov_rank": d.markov_rank, "markov_head_type": d.markov_head, "enable_confidence_head": d.enable_confidence_head,
        "confidence_head_with_markov": d.confidence_head_with_markov,
    }  # fmt: skip
    torch.set_default_dtype(getattr(torch, cfg.model.dtype))
    with device:
        pair = Qwen3ForCausalLM(config(cfg.model.target)), Qwen3DSparkModel(config(cfg.model.draft, **heads))
    torch.set_default_dtype(torch.float32)
    for mine, other in zip(models, pair, strict=True):
        source, sink = dict(mine.named_parameters()), dict(other.named_parameters())
        if source.keys() != sink.keys():
            raise SystemExit(f"The models' tensors have other names: {sorted(source.keys() ^ sink.keys())[:4]}.")
        for name, tensor in sink.items():
            tensor.copy_(source[name])
    return pair[0].eval(), pair[1].eval()


def one_process(args: argparse.Namespace) -> Result:
    """Both loops, prompt by prompt, the first of them in turn."""
    start = time.perf_counter()
    from dspark_lab.device import resolve
    from dspark_lab.models.weights import build

    import_deepspec(args.deepspec)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.process)
    cfg = config_of(args).replace(seed=args.process if args.temperature else 0)
    device = resolve(cfg.engine.device)
    models = build(cfg, device)
    with torch.inference_mode():
        ways: dict[str, Way] = {"ours": ours(cfg, models)}
    ways["theirs"] = theirs(args, cfg, models)
    prompts = prompts_of(args, cfg)
    with torch.inference_mode():
        for way in ways.values():
            way(prompts[0])
        load_s = time.perf_counter() - start
        done: dict[str, list[Done]] = {name: [] for name in ways}
        for i, prompt in enumerate(prompts):
            for name in list(ways)[:: 1 if (i + args.process) % 2 else -1]:
                done[name].append(ways[name](prompt))
    equal = sum(a.output == b.output for a, b in zip(done["ours"], done["theirs"], strict=True))
    return Result(summary(done["ours"]), summary(done["theirs"]), equal, len(prompts), load_s)


def summary(done: list[Done]) -> dict[str, float]:
    seconds, rounds = sum(d.seconds for d in done), sum(len(d.accepts) for d in done)
    made = sum(sum(d.accepts) for d in done)
    return {
        "tokens_per_s": (made + len(done)) / seconds,  # and the prefill's token
        "accept_length": made / rounds,
        "round_ms": 1e3 * seconds / rounds,
    }


def measured(args: argparse.Namespace, process: int) -> Result:
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--process", str(process)]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"process {process}: {done.stderr[-3000:]}")
    return Result(*json.loads(done.stdout.splitlines()[-1]))


def table(results: list[Result]) -> list[str]:
    """Medians over processes, and the ratio with its interval."""
    lines = [f"{'loop':8}{'tokens/s':>10}{'tokens a round':>16}{'ms a round':>12}   (medians of {len(results)})"]
    for name in ("ours", "theirs"):
        rows = [getattr(r, name) for r in results]
        of = {k: float(np.median([row[k] for row in rows])) for k in rows[0]}
        lines.append(f"{name:8}{of['tokens_per_s']:10.1f}{of['accept_length']:16.3f}{of['round_ms']:12.2f}")
    for what, key, sign in (("tokens/s", "tokens_per_s", 1), ("time of a round", "round_ms", -1)):
        i = t_interval(sign * np.log([r.ours[key] / r.theirs[key] for r in results]))
        span = f"[{np.exp(i.low):.2f}, {np.exp(i.high):.2f}]" if i.known else "(one process)"
        lines.append(f"{what}: ours is {np.exp(i.mean):.2f} × as fast {span}")
    lines.append(f"same tokens: {sum(r.equal for r in results)} of {sum(r.prompts for r in results)} generations")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspec", type=Path, required=True, help="a checkout of deepseek-ai/DeepSpec")
    parser.add_argument("--shape", choices=SHAPES, default="shipped")
    parser.add_argument("--drafter", default="dspark", help="folder under data/models, of the shipped shape")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of both loops; the checkpoint's where left out"
    )
    parser.add_argument(
        "--experts", help="transformers' way for experts (eager, grouped_mm, ...); its default where left out"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each kind of text")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("tokens", "prompts", "prompt_len", "processes", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1.")
    if args.process is not None:
        print(json.dumps(one_process(args)))
        return
    try:
        config_of(args)
        check_checkout(args.deepspec)
    except (LabError, FileNotFoundError) as e:
        parser.error(str(e))
    start = time.perf_counter()
    results = [measured(args, i) for i in range(args.processes)]
    print("\n".join(table(results)))
    print(
        f"{time.perf_counter() - start:.0f} s in all, loading {', '.join(f'{r.load_s:.0f}' for r in results)} s of a process"
    )
    if args.json:
        shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        args.json.write_text(json.dumps({**shown, "results": [r._asdict() for r in results]}))


if __name__ == "__main__":
    main()
