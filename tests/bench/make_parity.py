"""Tiny checkpoints and what DeepSpec computes from them, for the parity tests: ``python tests/bench/make_parity.py --help``.

Targets are random; a drafter is trained for a few hundred steps on its target's greedy text, so that accepted lengths differ from
round to round. Both are written by transformers and DeepSpec, and read back before their loop runs. A seed is kept only where no
decision was close: each argmax by `MARGIN` in logits, each confidence by `MARGIN` from the threshold. The files are those of the
two checkpoints beside them; ``confidence`` is absent without a confidence head. Made with DeepSpec afdfa7c, transformers 5.10.2.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspec_loop import Loop, import_deepspec
from safetensors.torch import save_file
from torch.nn import functional as F

MARGIN = 1e-3
NEW, PROMPTS, VOCAB = 48, (3, 11, 24), 64
TENSORS = ("target_hidden", "block_hidden", "base_logits", "corrected_logits", "draft_tokens", "confidence")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What one checkpoint is made to cover."""

    gamma: int
    head: str
    layers: tuple[int, ...]
    moe: bool = False
    confidence: str = "markov"
    """``markov``: reads W1 of the token before too; ``hidden``: the hidden state alone; ``none``."""
    threshold: float = 0.0
    draft_layers: int = 1
    steps: int = 300
    target: tuple[tuple[str, Any], ...] = ()
    """Further keys of the target's config."""


KINDS = {
    "qwen3_gated_b4": Kind(gamma=4, head="gated", layers=(-1, 1), target=(("tie_word_embeddings", True),)),
    "qwen3_rnn_b8": Kind(gamma=8, head="rnn", layers=(0, 1), confidence="none"),
    "qwen3_rank0_b6": Kind(gamma=6, head="none", layers=(-1, 0, 1), confidence="hidden", threshold=0.5),
    "qwen3_vanilla_b6": Kind(gamma=6, head="vanilla", layers=(1,), confidence="hidden", threshold=0.4, draft_layers=2),
    "qwen3moe_gated_b8": Kind(gamma=8, head="gated", layers=(0, 1), moe=True, threshold=0.6),
    "qwen3moe_rnn_b4": Kind(gamma=4, head="rnn", layers=(-1,), moe=True, confidence="hidden", threshold=0.3),
    "qwen3moe_rank0_b8": Kind(
        gamma=8, head="none", layers=(0, 1), moe=True, confidence="none",
        target=(("norm_topk_prob", False), ("decoder_sparse_step", 2)),
    ),
}  # fmt: skip


def shape(kind: Kind) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    } | dict(kind.target)


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Weights of a scale at which every part matters, the norms' too."""
    for name, p in model.named_parameters():
        noise = torch.randn_like(p)
        if "norm" in name:
            p.copy_(1 + 0.2 * noise)
        else:
            p.copy_(noise * (1.0 if "embed" in name or "markov_w1" in name else p.shape[-1] ** -0.5))


def make_target(kind: Kind) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if kind.moe:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**experts, **shape(kind)}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape(kind)))
    randomize(model)
    return model.eval()


class Wanted(dict):
    """Arguments as DeepSpec's config builder reads them: by attribute, and by ``in``."""

    __getattr__ = dict.__getitem__


def make_drafter(kind: Kind) -> Any:
    from deepspec.modeling.dspark.qwen3.config import build_draft_config
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import Qwen3Config

    dense = {k: v for k, v in shape(kind).items() if k not in ("norm_topk_prob", "decoder_sparse_step")}
    wanted = Wanted(
        num_draft_layers=kind.draft_layers, target_layer_ids=list(kind.layers), block_size=kind.gamma,
        mask_token_id=VOCAB - 1, num_anchors=8, markov_rank=0 if kind.head == "none" else 12,
        markov_head_type=kind.head, confidence_head_alpha=float(kind.confidence != "none"),
        confidence_head_with_markov=kind.confidence == "markov",
    )  # fmt: skip
    config = build_draft_config(Qwen3Config(**dense), wanted)
    config._attn_implementation = "sdpa"
    model = Qwen3DSparkModel(config)
    randomize(model)
    return model


@torch.no_grad()
def greedy(target: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    for _ in range(new):
        ids = torch.cat((ids, target(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids


def train(kind: Kind, target: Any, drafter: Any) -> None:
    """Cross entropy of the tokens that follow a random anchor, and of the confidence with whether the draft matches."""
    from deepspec.modeling.dspark.common import extract_context_feature

    text = greedy(target, torch.randint(VOCAB - 1, (48, 3)), 80)
    with torch.no_grad():
        states = target(input_ids=text, output_hidden_states=True).hidden_states
    context = extract_context_feature(states, kind.layers)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for _ in range(kind.steps):
        anchor = int(torch.randint(3, text.shape[1] - kind.gamma - 1, ()))
        block = text[:, anchor : anchor + kind.gamma + 1]
        ids = torch.full((len(text), kind.gamma), VOCAB - 1)
        ids[:, 0] = block[:, 0]
        hidden = drafter._forward_backbone(
            position_ids=torch.arange(anchor + kind.gamma)[None],
            noise_embedding=drafter.embed_tokens(ids),
            target_hidden_states=context[:, :anchor],
            is_causal=False,
        )
        logits = drafter.compute_logits(hidden)[:, None]
        if drafter.markov_head is not None:
            logits = drafter.markov_head.apply_block_logits(
                logits, token_ids=block[:, None, :-1], hidden_states=hidden[:, None]
            )
        loss = F.cross_entropy(logits.flatten(0, 2), block[:, 1:].flatten())
        confidence = drafter.predict_confidence_step(hidden, prev_token_ids=block[:, :-1])
        if confidence is not None:
            right = (logits[:, 0].argmax(-1) == block[:, 1:]).float()
            loss = loss + F.binary_cross_entropy_with_logits(confidence, right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval()


def watch(drafter: Any) -> list[dict[str, torch.Tensor]]:
    """What each round computes, a dict a round, filled as the drafter runs."""
    rounds: list[dict[str, torch.Tensor]] = []
    drafter.fc.register_forward_pre_hook(lambda _, args: rounds.append({"target_hidden": args[0].clone()}))
    drafter.norm.register_forward_hook(lambda _, __, out: rounds[-1].update(block_hidden=out.clone()))
    sample, predict = drafter.sample_draft_tokens, drafter.predict_confidence_step

    def sample_draft_tokens(base: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, corrected = sample(base, **kwargs)
        rounds[-1].update(base_logits=base.clone(), corrected_logits=corrected.clone(), draft_tokens=tokens.clone())
        return tokens, corrected

    def predict_confidence_step(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits = predict(*args, **kwargs)
        if logits is not None:
            rounds[-1].update(confidence=logits.sigmoid().clone())
        return logits

    drafter.sample_draft_tokens, drafter.predict_confidence_step = sample_draft_tokens, predict_confidence_step
    return rounds


def margin(kind: Kind, logits: torch.Tensor, rounds: list[dict[str, torch.Tensor]]) -> float:
    """The closest decision of one generation."""
    gaps = []
    for values in (logits, *(r["corrected_logits"] for r in rounds)):
        best = values.topk(2, dim=-1).values
        gaps.append(float((best[..., 0] - best[..., 1]).min()))
    if kind.threshold:
        gaps += [float((r["confidence"] - kind.threshold).abs().min()) for r in rounds]
    return min(gaps)


def run(kind: Kind, folder: Path, deepspec: Path) -> float:
    """Their loop over the checkpoint in ``folder``; writes its results beside it and returns the closest decision."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    drafter = Qwen3DSparkModel.from_pretrained(
        folder / "drafter", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    rounds = watch(drafter)
    loop = Loop(deepspec, target, drafter, max_new_tokens=NEW, confidence_threshold=kind.threshold)
    cases, tensors, closest = [], {}, float("inf")
    for index, length in enumerate(PROMPTS):
        prompt = torch.randint(VOCAB - 1, (length,)).tolist()
        rounds.clear()
        out = loop.generate(prompt)
        output = out.output_ids[0].tolist()
        with torch.no_grad():
            logits = target(input_ids=out.output_ids).logits
        plain = greedy(target, torch.tensor([prompt]), NEW)[0].tolist()
        closest = min(closest, margin(kind, logits[:, length - 1 : -1], rounds))
        lengths = {k: getattr(out, k) for k in ("acceptance_lengths", "proposal_lengths")}
        cases.append({"prompt": prompt, "output": output, **lengths, "greedy_equal": plain == output})
        with torch.no_grad():
            tensors[f"case{index}.target_logits"] = target(input_ids=torch.tensor([prompt])).logits
        for prefix, record in (("", rounds[0]), ("round3.", rounds[2])):
            tensors |= {f"case{index}.{prefix}{k}": record[k].contiguous() for k in TENSORS if k in record}
    spec = {"block_size": kind.gamma, "confidence_threshold": kind.threshold, "temperature": 0.0, "max_new_tokens": NEW}
    (folder / "cases.json").write_text(json.dumps({**spec, "head": kind.head, "cases": cases}) + "\n")
    save_file(tensors, folder / "expected.safetensors")
    for case in cases:
        print(
            "  ", case["acceptance_lengths"], case["proposal_lengths"] if kind.threshold else "", case["greedy_equal"]
        )
    return closest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspec", type=Path, required=True, help="a checkout of deepseek-ai/DeepSpec")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "data" / "parity")
    parser.add_argument("--only", choices=KINDS, help="one of the checkpoints")
    args = parser.parse_args()
    import_deepspec(args.deepspec)
    torch.set_num_threads(1)
    for name, kind in KINDS.items():
        if args.only not in (None, name):
            continue
        for seed in range(20):
            torch.manual_seed(seed)
            target, drafter = make_target(kind), make_drafter(kind)
            train(kind, target, drafter)
            target.save_pretrained(args.out / name / "target")
            drafter.save_pretrained(args.out / name / "drafter")
            closest = run(kind, args.out / name, args.deepspec)
            print(f"{name}: seed {seed}, closest decision {closest:.1e}")
            if closest > MARGIN:
                break
        else:
            raise SystemExit(f"{name}: each of 20 seeds had a decision closer than {MARGIN}.")


if __name__ == "__main__":
    main()
