"""Commands that measure, generate and list runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_lab.cli.options import Device, Json, Out, Preset, ProfileSteps, Set, Steps, ints, merged, names
from dspark_lab.cli.printing import console, print_table, progress, show
from dspark_lab.errors import LabError, unknown


def run(
    preset: Preset = "shipped",
    ep_size: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 1,
    alloc: Annotated[str, typer.Option(help="How num_token_non_padded reaches the device.")] = "on_demand",
    device: Device = "auto",
    num_steps: Steps = 128,
    repeats: Annotated[int, typer.Option(help="Blocks.")] = 1,
    profile_steps: ProfileSteps = 8,
    out: Out = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Measure one config: step latency, acceptance, a profiled capture."""
    import dspark_lab as lab

    cfg = lab.preset(preset, **merged({"ep_size": ep_size, "alloc": alloc, "device": device}, set_))
    with progress() as on_progress:
        made = lab.run(
            cfg, num_steps=num_steps, repeats=repeats, profile_steps=profile_steps, out=out, on_progress=on_progress
        )
    row = {
        "name": made.name,
        "path": str(made.path),
        "label": made.label,
        "status": made.status,
        "step_ms_p50": made.step_ms_p50,
        "accept_length": made.acceptance.accept_length if made.acceptance else None,
        "accept_by_position": made.acceptance.by_position if made.acceptance else None,
        "tokens_per_s": made.tokens_per_s,
        "digest": made.outputs.get("digest"),
        "traces": [str(p) for p in made.trace_paths],
    }
    show(row | {"ep": made.ep} if json_ else row, json_)
    if not json_ and made.config.parallel.ep_size > 1:
        shown = ["rank", "step_ms_p50", "wait_us", "dispatch_us", "experts_us", "combine_us", "real_share", "imbalance"]
        print_table(lab.ep_table([made])[shown].round(2))


def compare(
    preset: Preset = "tiny",
    ep_size: Annotated[str, typer.Option(help="One size or several, with commas.")] = "1",
    alloc: Annotated[
        str | None,
        typer.Option(help="Arms, with commas; default none (not at EP above 1), blocking, non_blocking, on_demand."),
    ] = None,
    device: Device = "auto",
    num_steps: Steps = 64,
    repeats: Annotated[int, typer.Option(help="Blocks an arm, interleaved.")] = 5,
    processes: Annotated[int, typer.Option(help="Processes an arm; the replicate where more than one.")] = 1,
    profile_steps: ProfileSteps = 0,
    floor: Annotated[bool, typer.Option("--floor", help="Add the arm with the mask off and alloc none.")] = False,
    baseline: Annotated[
        str | None, typer.Option(help="The arm compared with; default none where present, else the first.")
    ] = None,
    out: Out = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Compare allocation strategies: interleaved arms, paired intervals, a verdict against the A/A floor."""
    import dspark_lab as lab

    sizes = ints("ep_size", ep_size)
    allocs = names(alloc, "alloc") if alloc is not None else _default_arms(sizes)
    first = allocs[0] if not floor else "on_demand"
    if baseline is not None and baseline not in [*allocs, *(["none"] if floor else [])]:
        raise unknown("baseline", baseline, allocs)
    cfg = lab.preset(preset, **merged({"device": device, "ep_size": sizes[0], "alloc": first}, set_))
    with progress() as on_progress:
        runs = lab.sweep(
            cfg, num_steps=num_steps, repeats=repeats, processes=processes, profile_steps=profile_steps, floor=floor, out=out,
            on_progress=on_progress, ep_size=sizes, alloc=allocs,
        )  # fmt: skip
    show(lab.compare(runs, by="alloc", baseline=baseline), json_)


def _default_arms(sizes: list[int]) -> list[str]:
    """The history of the scalar; ``none`` only where nobody reads it."""
    return [*["none"] * all(s <= 1 for s in sizes), "blocking", "non_blocking", "on_demand"]


def generate(
    target: Annotated[
        Path, typer.Option(help="Hugging Face folder of the target (Qwen3 or Qwen3-MoE), or the one that ships.")
    ] = Path("shipped:target"),
    drafter: Annotated[
        Path, typer.Option(help="DeepSpec folder of the drafter; shipped:NAME is one that ships.")
    ] = Path("shipped:dspark-rnn"),
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids, with commas.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text, for byte-level models such as those that ship; instead of --prompt-ids.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 48,
    confidence_threshold: Annotated[
        float, typer.Option(help="Cut the block before the first confidence below; 0 keeps it.")
    ] = 0.0,
    block_size: Annotated[int | None, typer.Option(help="γ; at most the checkpoint's.")] = None,
    device: Device = "cpu",
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Continue a prompt by speculative decoding from a target and a drafter on disk."""
    import dspark_lab as lab

    ids = _prompt(prompt_ids, prompt)
    options: dict[str, Any] = {
        "device": device,
        "verify": "threshold" if confidence_threshold > 0 else "static",
        "confidence_threshold": confidence_threshold,
        "prompt_len": len(ids) or 1,
        "max_new_tokens": max_new_tokens,
        "batch_size": 1,
    } | ({} if block_size is None else {"block_size": block_size})
    cfg = lab.load_pair(target, drafter, **merged(options, set_))
    if cfg.engine.simulated_accept_length is not None:
        raise LabError("simulated_accept_length is for measuring; generate accepts what the target accepts.")
    out = lab.generate(cfg, [ids], max_new_tokens=max_new_tokens)[0]
    lengths = {"acceptance_lengths": out.acceptance_lengths, "proposal_lengths": out.proposal_lengths}
    text = {} if prompt is None else {"text": lab.text_of(out.tokens)}
    show({**text, "tokens": out.tokens, **lengths}, json_)


def _prompt(prompt_ids: str | None, prompt: str | None) -> list[int]:
    if (prompt_ids is None) == (prompt is None):
        raise LabError(
            "generate continues one prompt: give --prompt-ids 1,2,3 or, for a byte-level model, --prompt TEXT."
        )
    return list(prompt.encode("utf-8")) if prompt is not None else ints("prompt_ids", str(prompt_ids))


def recorded(json_: Json = False) -> None:
    """The runs that ship: H200 captures with their unprofiled step times."""
    import dspark_lab as lab

    show(lab.recorded(), json_)


def demo(logdir: Annotated[Path, typer.Option(help="TensorBoard folder to write.")] = Path("tb")) -> None:
    """The main job without a browser: compare strategies here, beside the recorded H200s; write TensorBoard."""
    from dspark_lab.study.demo import demo as make

    with progress() as on_progress:
        result = make(logdir=logdir, on_progress=on_progress)
    for title, table in result.tables.items():
        console.print(f"\n[bold]{title}[/bold]")
        print_table(table)
    console.print(f"\nTensorBoard folder: {result.logdir} (tensorboard --logdir {result.logdir})")


def record(
    part: Annotated[str, typer.Argument(help="one (one GPU), two (two GPUs), ep4 or ep8 (EP 1 to as many GPUs).")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and the archive.")] = Path("recordings"),
    only: Annotated[str, typer.Option(help="Sheets, with commas; default all of the part.")] = "",
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="The preset tiny on this CPU, a few steps: shows that the part runs.")
    ] = False,
) -> None:
    """Measure again what ships in data/recorded; leaves one archive."""
    from dspark_lab.study.record import record as make

    with progress() as on_progress:
        console.print(f"archive: {make(part, out=out, only=names(only), rehearse=rehearse, on_progress=on_progress)}")


def doctor(json_: Json = False) -> None:
    """What is installed, which devices there are, and what to do about what is missing."""
    import dspark_lab as lab

    show(lab.doctor(), json_)
