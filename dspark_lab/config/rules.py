"""What may be combined. Each rule raises a `LabError` with the value, the legal ones and the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from dspark_lab.config.choices import (
    DISPATCHERS,
    MIN_TEMPERATURE,
    foreign_dispatchers,
    is_dispatcher,
    parse_alloc,
)
from dspark_lab.config.kinds import LEGAL, check_fields, shown
from dspark_lab.config.parts import DecoderConfig
from dspark_lab.config.shipped import PROMPT_BYTES
from dspark_lab.errors import LabError, unknown

if TYPE_CHECKING:
    from dspark_lab.config.lab import LabConfig


def check(cfg: LabConfig) -> None:
    """Raises the first rule that ``cfg`` breaks."""
    for rule in RULES:
        rule(cfg)


def _preset(cfg: LabConfig) -> None:
    """The label names folders of runs."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", cfg.preset) or ".." in cfg.preset:
        raise LabError(
            f"preset={shown(cfg.preset)} is no safe label: it names folders of runs; choose 1 to 64 letters, digits, '.', '_' "
            "and '-', without '..', and a letter, digit or '_' first."
        )


def _kinds(cfg: LabConfig) -> None:
    check_fields(cfg)
    m = cfg.model
    check_fields(m)
    check_fields(cfg.parallel)
    check_fields(cfg.engine)
    check_fields(m.drafter)
    check_decoder(m.target, "target_")
    check_decoder(m.draft, "draft_")


def check_decoder(c: DecoderConfig, prefix: str = "") -> None:
    """Raises `LabError` where the shape ``c`` of a stack of layers is none; ``prefix`` goes before the names."""
    check_fields(c, prefix)
    for name in ("rms_norm_eps", "rope_theta"):
        if getattr(c, name) <= 0:
            raise LabError(f"{prefix}{name}={getattr(c, name)!r} is not a finite number above 0.")
    if c.head_dim % 2:
        raise LabError(f"{prefix}head_dim={c.head_dim} is odd, and rotary positions turn pairs; choose an even one.")
    if c.num_attention_heads % c.num_key_value_heads:
        raise LabError(
            f"{prefix}num_attention_heads={c.num_attention_heads} is no multiple of "
            f"{prefix}num_key_value_heads={c.num_key_value_heads}; each K/V head serves equally many."
        )
    if not c.num_experts:
        return
    if not 1 <= c.num_experts_per_tok <= c.num_experts:
        raise LabError(
            f"{prefix}num_experts_per_tok={c.num_experts_per_tok} is outside 1 to {c.num_experts}, "
            f"which is {prefix}num_experts."
        )
    if c.moe_intermediate_size < 1:
        raise LabError(
            f"{prefix}moe_intermediate_size={c.moe_intermediate_size} is not a whole number of at least 1, which "
            f"{c.num_experts} experts need; choose one, or {prefix}num_experts=0."
        )


def _choices(cfg: LabConfig) -> None:
    e, m, p = cfg.engine, cfg.model, cfg.parallel
    for part in (e, m, m.drafter, p):
        for name, value in vars(part).items():
            if name in LEGAL and name != "alloc" and value not in LEGAL[name]:
                raise unknown(name, value, LEGAL[name])
    parse_alloc(e.alloc)
    if not is_dispatcher(p.dispatcher):
        raise unknown("dispatcher", p.dispatcher, [*DISPATCHERS, *foreign_dispatchers(), "package.module:callable"])


def _numbers(cfg: LabConfig) -> None:
    e = cfg.engine
    if not 0.0 <= e.confidence_threshold <= 1.0:
        raise LabError(
            f"confidence_threshold={e.confidence_threshold!r} is not between 0 and 1; 0 keeps every block whole."
        )
    if e.host_work_us < 0:
        raise LabError(f"host_work_us={e.host_work_us!r} is not a time: microseconds, at least 0.")
    if not e.buckets:
        raise LabError(f"buckets=[] has no batch size to pad to; give at least one of {e.batch_size} or more.")
    if e.batch_size > max(e.buckets):
        raise LabError(f"batch_size={e.batch_size} is over the largest bucket, {max(e.buckets)}; give larger buckets.")


def _experts(cfg: LabConfig) -> None:
    ep, p = cfg.parallel.ep_size, cfg.parallel
    if not 0 < p.capacity_factor <= 1:
        raise LabError(
            f"capacity_factor={p.capacity_factor!r} is not above 0 and at most 1; 1 has room for every row on every rank."
        )
    if ep == 1:
        if p.num_redundant_experts:
            raise LabError(
                f"num_redundant_experts={p.num_redundant_experts} needs ep_size above 1: at EP 1 every expert is on the one rank; choose 0."
            )
        return
    if not cfg.model.target.num_experts and not cfg.model.draft.num_experts:
        raise LabError(
            f"ep_size={ep} needs experts to share out, and neither target nor drafter has any; choose ep_size=1."
        )
    redundant = cfg.parallel.num_redundant_experts
    for who, decoder in (("target", cfg.model.target), ("drafter", cfg.model.draft)):
        if decoder.num_experts and (decoder.num_experts + redundant) % ep:
            raise _does_not_divide(ep, who, decoder, redundant)
        if decoder.num_experts and redundant > decoder.num_experts * (ep - 1):
            raise LabError(
                f"num_redundant_experts={redundant} is over {decoder.num_experts * (ep - 1)}: a copy of each of the {who}'s "
                f"{decoder.num_experts} experts on each of {ep} ranks."
            )


def _does_not_divide(ep: int, who: str, decoder: DecoderConfig, redundant: int) -> LabError:
    n = decoder.num_experts
    more = -n % ep
    given = f" and {redundant} redundant ones" if redundant else ""
    return LabError(
        f"ep_size={ep} does not divide the {who}'s {n} experts{given}; sizes that do: {_common_divisors(n)}. "
        f"With {more} redundant expert{'s' * (more != 1)} ({n + more} in all) it would divide: num_redundant_experts={more}."
    )


def _world(cfg: LabConfig) -> None:
    p = cfg.parallel
    attn, moe, world = p.attn_dp * p.tp_size, p.moe_dp * p.ep_size, p.world_size
    if world % attn or world % moe:
        raise LabError(
            f"attn_dp·tp_size = {attn} and moe_dp·ep_size = {moe} do not share a world size: the larger must be a "
            f"multiple of the smaller (attn_dp={p.attn_dp}, tp_size={p.tp_size}, moe_dp={p.moe_dp}, ep_size={p.ep_size})."
        )


def _tensor_parallel(cfg: LabConfig) -> None:
    """Heads, inner dimensions and the vocabulary can be shared out. Vocabularies need not divide, the others must."""
    tp, moe_tp = cfg.parallel.tp_size, cfg.parallel.moe_tp
    for who, c in (("target", cfg.model.target), ("drafter", cfg.model.draft)):
        shared = {"num_key_value_heads": c.num_key_value_heads, "num_attention_heads": c.num_attention_heads}
        if c.num_moe_layers < c.num_hidden_layers:
            shared["intermediate_size"] = c.intermediate_size
        for name, whole in shared.items():
            if whole % tp:
                raise LabError(
                    f"tp_size={tp} does not divide the {who}'s {name}={whole}; sizes that divide all that is shared: "
                    f"{_common_divisors(*shared.values())}."
                )
        if c.vocab_size < tp:
            raise LabError(f"tp_size={tp} is over the {who}'s vocab_size={c.vocab_size}; choose at most that.")
        if c.num_moe_layers and c.moe_intermediate_size % moe_tp:
            raise _shared_experts(cfg, who, c)


def _shared_experts(cfg: LabConfig, who: str, c: DecoderConfig) -> LabError:
    """More ranks than ``ep_size`` share each expert, and their number does not divide it: what made them, and what would do."""
    p = cfg.parallel
    several = [name for name in ("attn_dp", "tp_size", "moe_dp") if getattr(p, name) > 1]
    made = ", ".join(f"{name}={getattr(p, name)}" for name in several)
    experts = [m.num_experts for m in (cfg.model.target, cfg.model.draft) if m.num_experts]
    if all(n % p.world_size == 0 for n in experts):
        way = f"ep_size={p.world_size}"
    else:
        way = f"{several[0]} and ep_size alike, of {_common_divisors(*experts)}"
    if p.attn_dp == 1:
        way += f", or a number of ranks that divides: {_common_divisors(c.moe_intermediate_size)}"
    return LabError(
        f"{made} is {p.world_size} ranks, of which {p.moe_tp} share each expert at ep_size={p.ep_size}, which does not divide "
        f"the {who}'s moe_intermediate_size={c.moe_intermediate_size}; choose {way}."
    )


def _common_divisors(*values: int) -> str:
    whole = math.gcd(*values)
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    return ", ".join(map(str, sorted({*small, *(whole // d for d in small)})))


def _scalar(cfg: LabConfig) -> None:
    e, how = cfg.engine, cfg.engine.how
    if how.transfer == "graph_slot" and not e.use_graph:
        raise LabError(
            f"alloc={e.alloc!r} writes into a captured graph's input and use_graph is False; "
            "choose use_graph=True, or alloc='persistent', which fills one device buffer without graphs."
        )
    if cfg.needs_scalar and how.guard == "never":
        raise LabError(
            f"alloc={e.alloc!r} at ep_size={cfg.parallel.ep_size} leaves num_token_non_padded None, and the MoE router reads it "
            "there to mask padded rows; choose alloc='on_demand' (or blocking, non_blocking, pinned, persistent), "
            "or mask_padding=False, which computes padded rows and throws them away."
        )


def _sampling(cfg: LabConfig) -> None:
    e, vocab = cfg.engine, cfg.model.target.vocab_size
    if e.temperature != 0 and e.temperature < MIN_TEMPERATURE:
        raise LabError(f"temperature={e.temperature!r} is neither 0 (greedy) nor at least {MIN_TEMPERATURE}.")
    if not 0 < e.top_p <= 1:
        raise LabError(f"top_p={e.top_p!r} is not above 0 and at most 1; 1 keeps every token.")
    if e.temperature == 0 and (e.top_k > 1 or e.top_p < 1):
        raise LabError(
            f"top_k={e.top_k} and top_p={e.top_p!r} are not read at temperature=0.0, which takes the likeliest token; "
            "choose a temperature above 0, or top_k=0 and top_p=1.0."
        )
    for token in e.stop_token_ids:
        if token >= vocab:
            raise LabError(
                f"stop_token_ids holds {token}, which is beyond the vocabulary: legal ids are 0 to {vocab - 1}."
            )
    if e.temperature > 0 and e.simulated_accept_length is not None:
        raise LabError(
            f"simulated_accept_length={e.simulated_accept_length} draws what is accepted, and temperature={e.temperature!r} "
            "samples it; choose temperature=0.0, or simulated_accept_length=None."
        )
    if e.stop_token_ids and e.simulated_accept_length is not None:
        raise LabError(
            f"stop_token_ids={list(e.stop_token_ids)} end a request, and simulated_accept_length={e.simulated_accept_length} "
            "says how many tokens a step commits; choose stop_token_ids=[], or simulated_accept_length=None."
        )


def _verification(cfg: LabConfig) -> None:
    e, d = cfg.engine, cfg.model.drafter
    if e.verify != "threshold" and e.confidence_threshold > 0:
        raise LabError(
            f"confidence_threshold={e.confidence_threshold} is not read with verify={e.verify!r}, which asks no threshold; "
            "choose verify='threshold'."
        )
    if e.verify != "static" and not d.has_confidence:
        raise LabError(
            f"verify={e.verify!r} needs a confidence head and this drafter, of kind {d.drafter_kind!r}, has none; choose "
            "verify='static'."
        )
    for name, value, needs in (
        ("sps_path", e.sps_path, "scheduled"), ("sts_path", e.sts_path, "threshold' or 'scheduled"),
    ):  # fmt: skip
        if value is not None and e.verify not in needs:
            raise LabError(f"{name}={shown(value)} is not read with verify={e.verify!r}; choose verify='{needs}'.")
    if e.layout == "compact" and cfg.parallel.attn_dp > 1:
        raise LabError(
            f"layout='compact' lays the rows of all requests one behind the other, and attn_dp={cfg.parallel.attn_dp} deals "
            "requests out to ranks in whole blocks; choose layout='padded', or attn_dp=1."
        )
    sim = e.simulated_accept_length
    if sim is not None and not 1.0 <= sim <= d.block_size + 1:
        raise LabError(
            f"simulated_accept_length={sim} is outside 1 to {d.block_size + 1} "
            f"(block_size {d.block_size} and the bonus token); None accepts what the target accepts."
        )


def _drafter(cfg: LabConfig) -> None:
    m = cfg.model
    d, t = m.drafter, m.target
    ids = d.target_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= t.num_hidden_layers:
        raise LabError(
            f"target_layer_ids={list(ids)} must strictly increase within -1 (the embedding) to {t.num_hidden_layers - 1}."
        )
    if not 0 <= d.mask_token_id < m.draft.vocab_size:
        raise LabError(f"mask_token_id={d.mask_token_id} is outside the drafter's vocabulary of {m.draft.vocab_size}.")
    if m.draft.vocab_size != t.vocab_size or m.draft.hidden_size != t.hidden_size:
        raise LabError(
            f"drafter (vocab_size {m.draft.vocab_size}, hidden_size {m.draft.hidden_size}) and target "
            f"({t.vocab_size}, {t.hidden_size}) must agree in both: they are not of one pair."
        )
    if (d.markov_head == "none") != (d.markov_rank == 0):
        raise LabError(
            f"markov_head={d.markov_head!r} and markov_rank={d.markov_rank} contradict: rank 0 goes with 'none'."
        )
    if d.drafter_kind == "dflash" and d.markov_rank:
        raise LabError(
            f"drafter_kind='dflash' drafts without a Markov head and markov_rank={d.markov_rank} asks for one: choose "
            "markov_head='none' and markov_rank=0, or drafter_kind='dspark'."
        )
    if d.drafter_kind == "eagle3" and m.draft.num_hidden_layers != 1:
        raise LabError(
            f"drafter_kind='eagle3' has one layer and draft_num_hidden_layers={m.draft.num_hidden_layers}; set it to 1."
        )
    if m.weights == "bigram" and d.drafter_kind == "eagle3":
        raise LabError(
            "weights='bigram' are made for drafters with a Markov head, and drafter_kind='eagle3' has none; choose "
            "weights='random' or a checkpoint."
        )
    if m.weights == "checkpoint" and not (m.target_path and m.drafter_path):
        raise LabError(
            "weights='checkpoint' needs target_path and drafter_path; lab.load_pair(target, drafter) sets both."
        )


def _context(cfg: LabConfig) -> None:
    e, m = cfg.engine, cfg.model
    need = e.prompt_len + e.max_new_tokens + m.drafter.block_size + 1
    if need > m.context_len:
        raise LabError(
            f"prompt_len={e.prompt_len} + max_new_tokens={e.max_new_tokens} + a block of {m.drafter.block_size + 1} is {need} "
            f"positions, over context_len={m.context_len}; choose max_new_tokens of at most "
            f"{max(m.context_len - need + e.max_new_tokens, 0)} or a larger context_len."
        )


def _text(cfg: LabConfig) -> None:
    e, vocab = cfg.engine, cfg.model.target.vocab_size
    if e.text == "random":
        return
    if vocab < 256:
        raise LabError(
            f"text={e.text!r} has bytes for tokens, ids 0 to 255, and the target's vocab_size is {vocab}; choose text='random'."
        )
    if e.prompt_len > PROMPT_BYTES:
        raise LabError(
            f"prompt_len={e.prompt_len} is over {PROMPT_BYTES}, the length of the held-out prompts of text={e.text!r}; choose at "
            f"most {PROMPT_BYTES}, or text='random'."
        )


RULES: tuple[Callable[[LabConfig], None], ...] = (
    _kinds,
    _preset,
    _choices,
    _numbers,
    _drafter,
    _world,
    _experts,
    _tensor_parallel,
    _scalar,
    _sampling,
    _verification,
    _context,
    _text,
)
