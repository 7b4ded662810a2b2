"""The forward of a training batch: all blocks of all sequences at once, teacher-forced. B sequences, A anchors, γ slots, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.train.anchors import Anchors, block_mask, label_positions
from dspark_lab.train.forward import attend, feed_forward, keys_values, queries, turns


@dataclass(frozen=True, kw_only=True)
class BlockOutput:
    """What the losses read."""

    logits: Tensor
    """[B, A, γ, V] corrected draft logits, each slot's given the true tokens before it."""
    confidence_logits: Tensor | None
    """[B, A, γ] float32 before the sigmoid; None without that head."""


def block_forward(drafter: Drafter | EagleDrafter, tokens: Tensor, aux: Tensor, anchors: Anchors) -> BlockOutput:
    """``tokens`` [B, S] int64 and the target's ``aux`` [B, S, n·H] to the logits of every slot of ``anchors``."""
    if isinstance(drafter, EagleDrafter):
        return _chains(drafter, tokens, aux, anchors)
    hidden = block_hidden(drafter, tokens, aux, anchors)
    logits = drafter.lm_head(hidden)
    head, embedded = drafter.markov_head, None
    if head is not None:
        embedded = head.embed(true_tokens(tokens, anchors.positions, drafter.block_size))
        logits = logits + head.block(embedded, hidden)
    confidence = None
    if drafter.confidence_head is not None:
        confidence = drafter.confidence_head.logits(hidden, embedded if drafter.confidence_with_markov else None)
    return BlockOutput(logits=logits, confidence_logits=confidence)


def true_tokens(tokens: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """x_{k−1} of each slot [B, A, γ]: the true tokens at anchor .. anchor + γ − 1; past the end, the last one."""
    before = (label_positions(positions, block_size) - 1).clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, before.flatten(1)).view(before.shape)


def block_hidden(drafter: Drafter, tokens: Tensor, aux: Tensor, anchors: Anchors) -> Tensor:
    """[B, A, γ, H] after the final norm: one parallel forward over all blocks, each seeing the context before its anchor."""
    b, s = tokens.shape
    a, width = anchors.positions.shape[1], drafter.query_len
    ids = torch.full((b, a, width), drafter.mask_token_id, dtype=torch.int64, device=tokens.device)
    ids[..., 0] = tokens.gather(1, anchors.positions)
    x = drafter.embed_tokens(ids.flatten(1))
    context = drafter.hidden_norm(drafter.fc(aux))
    places = anchors.positions[..., None] + torch.arange(width, device=tokens.device)
    block_turn = turns(drafter, places.flatten(1), x.dtype)
    context_turn = turns(drafter, torch.arange(s, device=tokens.device).expand(b, s), x.dtype)
    mask = block_mask(anchors, s, width)
    for layer in drafter.decoder_layers:
        attention, y = layer.self_attn, layer.input_layernorm(x)
        k_context, v_context = keys_values(attention, context, context_turn)
        k, v = keys_values(attention, y, block_turn)
        k, v = torch.cat((k_context, k), dim=2), torch.cat((v_context, v), dim=2)
        x = x + attend(attention, queries(attention, y, block_turn), k, v, mask=mask)
        x = x + feed_forward(layer, layer.post_attention_layernorm(x))[0]
    return drafter.norm(x).view(b, a, width, -1)[:, :, width - drafter.block_size :]


def _chains(drafter: EagleDrafter, tokens: Tensor, aux: Tensor, anchors: Anchors) -> BlockOutput:
    """γ steps of one row a block: each reads the true token and, from the second on, its own output of the step before."""
    b, s = tokens.shape
    layer, attention = drafter.layer, drafter.layer.self_attn
    feature = drafter.fc(aux)
    before = torch.cat((torch.zeros_like(feature[:, :1]), feature[:, :-1]), dim=1)  # of the position before each
    everywhere = torch.arange(s, device=tokens.device).expand(b, s)
    k_all, v_all = keys_values(
        attention, drafter.layer_input(tokens, before), turns(drafter, everywhere, feature.dtype)
    )
    seen = (torch.arange(s, device=tokens.device) < anchors.positions[..., None])[:, None]
    given = true_tokens(tokens, anchors.positions, drafter.block_size)
    state = before.gather(1, anchors.positions[..., None].expand(-1, -1, feature.shape[-1]))
    chain: list[tuple[Tensor, Tensor]] = []
    logits = []
    for step in range(drafter.block_size):
        turn = turns(drafter, anchors.positions + step, feature.dtype)
        y = drafter.layer_input(given[..., step], state)
        chain.append(keys_values(attention, y, turn))
        x = state + _attend_chain(drafter, queries(attention, y, turn), k_all, v_all, chain, seen)
        state = x + feed_forward(layer, layer.post_attention_layernorm(x))[0]
        logits.append(drafter.lm_head(drafter.norm(state)))
    return BlockOutput(logits=torch.stack(logits, dim=2), confidence_logits=None)


def _attend_chain(
    drafter: EagleDrafter,
    q: Tensor,
    k_all: Tensor,
    v_all: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    seen: Tensor,
) -> Tensor:
    """[B, A, H]: a row sees the context before its anchor, and the rows of its own block up to itself.

    ``q`` [B, heads, A, d]; ``k_all``, ``v_all`` [B, kv heads, S, d]; ``chain`` K and V [B, kv heads, A, d] of each step so far.
    """
    attention = drafter.layer.self_attn
    group, scale = attention.num_heads // attention.num_kv_heads, attention.head_dim**-0.5
    k_all, v_all = k_all.repeat_interleave(group, dim=1), v_all.repeat_interleave(group, dim=1)
    k_own = torch.stack([k for k, _ in chain], dim=3).repeat_interleave(group, dim=1)  # [B, heads, A, steps, d]
    v_own = torch.stack([v for _, v in chain], dim=3).repeat_interleave(group, dim=1)
    context = (q @ k_all.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    own = (q[:, :, :, None] * k_own).sum(dim=-1) * scale
    weights = torch.cat((context, own), dim=-1).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    s = k_all.shape[2]
    y = weights[..., :s] @ v_all + (weights[..., s:, None] * v_own).sum(dim=3)
    return attention.o_proj(y.transpose(1, 2).flatten(2))
