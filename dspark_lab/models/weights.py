"""Where weights come from: random, a synthetic pair, or a checkpoint; `build` is the one entry."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from dspark_lab.config.lab import LabConfig
from dspark_lab.ep.experts import ExpertGroup
from dspark_lab.ep.groups import ONE_RANK, ParallelGroups, RankGroup, process_groups
from dspark_lab.errors import LabError
from dspark_lab.models import checkpoint, fused
from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.models.kinds import AnyDrafter, make_drafter
from dspark_lab.models.lookup import LookupDrafter
from dspark_lab.models.moe import Experts
from dspark_lab.models.shards import Shard, copy_whole, shard_of
from dspark_lab.plan.load import Loads

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

KNOWN = 0.8
"""Share of tokens whose successor the bigram drafter knows: accept lengths near 1 + Σ 0.8^k for k = 1..γ."""


def build(
    cfg: LabConfig,
    device: torch.device | str = "cpu",
    groups: ParallelGroups | None = None,
    *,
    loads: dict[str, Loads] | None = None,
) -> tuple[Target, AnyDrafter]:
    """Target and drafter of ``cfg`` on ``device``, this rank's part of them only, ready for inference.

    ``groups`` (None: of the default process group) tell which part, and join the ranks. ``loads``: rows of each expert in
    each MoE layer of ``target`` and ``drafter``, which ``placement="balanced"`` needs. Raises `LabError` where the config
    needs several ranks and there are none, and where a checkpoint does not fit.
    """
    if groups is None:
        groups = process_groups(cfg.parallel, device)
    if cfg.model.weights == "checkpoint":
        checkpoint.check_shapes(cfg)
    group = ExpertGroup.of(
        cfg.parallel,
        groups.moe,
        groups.rows,
        mask_padding=cfg.engine.mask_padding,
        padding_policy=cfg.engine.padding_policy,
        fixed_sizes=cfg.engine.use_graph,
    )
    return build_pair(cfg, group, device, groups.tp, loads=loads)


def build_pair(
    cfg: LabConfig,
    group: ExpertGroup,
    device: torch.device | str = "cpu",
    tp: RankGroup = ONE_RANK,
    *,
    loads: dict[str, Loads] | None = None,
) -> tuple[Target, AnyDrafter]:
    """As `build`, for an explicit `ExpertGroup` and TP group."""
    dtype, loads = DTYPES[cfg.model.dtype], loads or {}
    target = Target(cfg.model.target, replace(group, loads=loads.get("target")), tp, device=device, dtype=dtype)
    drafter = make_drafter(cfg.model, replace(group, loads=loads.get("drafter")), tp, device=device, dtype=dtype)
    if cfg.model.weights == "checkpoint":
        checkpoint.load_weights(target, str(cfg.model.target_path))
        if cfg.model.drafter.drafter_kind != "lookup":
            checkpoint.load_weights(drafter, str(cfg.model.drafter_path))
    elif cfg.model.weights == "bigram":
        assert not isinstance(drafter, EagleDrafter), "refused by a rule of the config"
        init_bigram(target, drafter, cfg.seed)
    else:
        init_random(target, cfg.seed)
        init_random(drafter, cfg.seed + 1)
    if fused.ENABLED and torch.device(device).type == "cuda":
        for layer in (*target.model.decoder_layers, *drafter.decoder_layers):
            fused.join_weights(layer.self_attn)
    return target.requires_grad_(False).eval(), drafter.requires_grad_(False).eval()


@torch.no_grad()
def init_random(module: nn.Module, seed: int) -> None:
    """Random weights whose outputs stay of order 1: N(0, 1/fan_in), norms 1 + 0.1·N(0, 1), embeddings N(0, 1).

    Every tensor has a seed of its own, every expert one by its logical id, and is drawn whole before a rank takes its part:
    equal at any EP and TP size and on any rank of one kind of device.
    """
    experts = {name: m for name, m in module.named_modules() if isinstance(m, Experts)}
    for name, tensor in module.named_parameters():
        owner, shard = experts.get(name.rpartition(".")[0]), shard_of(tensor)
        if owner is None:
            _fill(tensor, name, seed, shard)
            continue
        for part, expert in zip(tensor, owner.expert_ids, strict=True):
            _fill(part, f"{name}.{expert}", seed, shard)


def _fill(tensor: Tensor, name: str, seed: int, shard: Shard | None) -> None:
    """One tensor in place, its ``shard`` of the whole one, which is drawn on its own device in float32."""
    generator = torch.Generator(tensor.device).manual_seed(_seed_of(name, seed))
    shape = list(tensor.shape) if shard is None else shard.whole_shape(tensor.shape)
    noise = torch.randn(shape, generator=generator, device=tensor.device, dtype=torch.float32)
    if "norm" in name:
        noise = 1 + 0.1 * noise
    elif name.endswith("bias"):
        noise = 0.1 * noise
    elif "embed_tokens" not in name:
        noise = noise * shape[-1] ** -0.5
    if shard is None:
        tensor.copy_(noise)
    else:
        shard.copy(tensor, noise)


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


@torch.no_grad()
def init_bigram(target: Target, drafter: Drafter | LookupDrafter, seed: int) -> None:
    """A synthetic pair: the target's next token is f(x), and the drafter's Markov head knows f for most x.

    f is one cycle over the vocabulary without the mask token. The target's head maps the normed embedding of x to f(x);
    its layers add a moderate amount, so that attention and experts matter. The drafter has a wrong entry for the other
    tokens, and one coordinate of W1 tells its confidence head which they are. Raises `LabError` for a tied target.
    """
    if target.lm_head is None:
        raise LabError(
            "weights='bigram' writes next = f(x) into the target's own lm_head, and tie_word_embeddings leaves it none."
        )
    init_random(target, seed)
    init_random(drafter, seed + 1)
    generator = torch.Generator().manual_seed(_seed_of("bigram", seed))
    after, guess, known = _cycles(target.cfg.vocab_size, drafter.mask_token_id, generator)
    embed = _rows_of_norm(target.cfg.vocab_size, target.cfg.hidden_size, generator)
    head = torch.zeros_like(embed)
    head[after] = embed
    head[drafter.mask_token_id] = 0
    copy_whole(target.model.embed_tokens.weight, embed)
    copy_whole(target.lm_head.weight, head * (24 / target.cfg.hidden_size))
    _damp_layers(target, 0.6)
    if isinstance(drafter, Drafter):
        _teach(drafter, embed, guess, known, generator)


def _cycles(vocab_size: int, mask_token_id: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """f(x), the drafter's guess at it, and where they are equal: [V] each. The mask token maps to itself."""
    tokens = torch.tensor([x for x in range(vocab_size) if x != mask_token_id])
    order = tokens[torch.randperm(len(tokens), generator=generator)]
    after = torch.arange(vocab_size)
    after[order] = order.roll(-1)
    unknown = tokens[torch.randperm(len(tokens), generator=generator)[: max(2, round(len(tokens) * (1 - KNOWN)))]]
    guess = after.clone()
    guess[unknown] = after[unknown.roll(-1)]
    return after, guess, guess == after


def _rows_of_norm(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """[rows, width] random directions of length √width."""
    noise = torch.randn(rows, width, generator=generator)
    return noise * (width**0.5 / noise.norm(dim=-1, keepdim=True))


def _damp_layers(target: Target, amount: float) -> None:
    """Scales what all layers add together to about ``amount`` of the embedding."""
    scale = amount / (2 * target.cfg.num_hidden_layers) ** 0.5
    for name, tensor in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor.mul_(scale)


def _teach(drafter: Drafter, embed: Tensor, guess: Tensor, known: Tensor, generator: torch.Generator) -> None:
    """The guess into the Markov head, faintly into row 1 of the base logits, and the flag into the confidence head."""
    copy_whole(drafter.embed_tokens.weight, embed)
    base = torch.zeros_like(embed)
    base[guess] = embed * (4 / embed.shape[1])
    base[drafter.mask_token_id] = 0
    copy_whole(drafter.lm_head.weight, base)
    flag = torch.where(known, 1.0, -1.0) + 0.25 * torch.randn(len(known), generator=generator)
    if drafter.markov_head is not None:
        _teach_markov(drafter, guess, flag, generator)
    if drafter.confidence_head is not None and drafter.confidence_with_markov:
        drafter.confidence_head.proj.weight.mul_(0.2)
        drafter.confidence_head.proj.weight[0, -1] = 2.0
        drafter.confidence_head.proj.bias.fill_(0.25)


def _teach_markov(drafter: Drafter, guess: Tensor, flag: Tensor, generator: torch.Generator) -> None:
    """W1[x]·W2[guess(x)] stands out by 30; the last coordinate carries the flag, which W2 does not read."""
    assert drafter.markov_head is not None
    vocab_size, rank = drafter.markov_head.markov_w1.weight.shape
    w1, w2 = torch.zeros(vocab_size, rank), torch.zeros(vocab_size, rank)
    w1[:, -1] = flag
    if rank > 1:
        code = _rows_of_norm(vocab_size, rank - 1, generator)
        w1[:, :-1] = code
        w2[guess, :-1] = code * (30 / (rank - 1))
    w2[drafter.mask_token_id] = 0
    copy_whole(drafter.markov_head.markov_w1.weight, w1)
    copy_whole(drafter.markov_head.markov_w2.weight, w2)
