"""`LanguageTask`: a small target learns text, token after token; and the sampling of text from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.decoder import Target
from dspark_lab.train.data import TokenData
from dspark_lab.train.forward import causal_forward
from dspark_lab.train.trainer import Recipe

BALANCE = 0.01
"""What uneven use of experts costs."""


class LanguageTask:
    """Cross-entropy of the next token, and the balance of experts."""

    def __init__(self, target: Target, data: TokenData, recipe: Recipe) -> None:
        self.model, self.recipe = target.requires_grad_(True).train(), recipe
        self.data = data.to(target.model.device)

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``ce`` in nats a token, ``balance`` a layer (1 at best), and their weighted sum."""
        tokens = inputs["tokens"]
        states = causal_forward(self.model.model, tokens)
        logits = self.model.local_logits(states.hidden[:, :-1]).float()
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        counts = inputs["mask"][:, 1:].flatten()
        ce = (each * counts).sum() / counts.sum().clamp(min=1)
        balance = states.balance / max(1, self.model.cfg.num_moe_layers)
        return {"total": ce + BALANCE * balance, "ce": ce, "balance": balance}

    def inputs_of(self, step: int) -> dict[str, Tensor]:
        tokens, mask = self.data.batch(self.data.rows(step, self.recipe.batch_size, self.recipe.seed))
        return {"tokens": tokens, "mask": mask}


@torch.no_grad()
def bits_per_token(target: Target, data: TokenData, *, batch_size: int = 16) -> float:
    """Mean −log2 p of the tokens of ``data``, the first of each sequence left out."""
    total, num = 0.0, 0
    device = target.model.device
    for first in range(0, len(data), batch_size):
        tokens, mask = data.batch(torch.arange(first, min(first + batch_size, len(data))))
        tokens, mask = tokens.to(device), mask.to(device)
        logits = target.local_logits(causal_forward(target.model, tokens).hidden[:, :-1]).float()
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        total += float((each * mask[:, 1:].flatten()).sum())
        num += int(mask[:, 1:].sum())
    return total / max(1, num) / 0.6931471805599453


@torch.inference_mode()
def sample(
    target: Target, prompts: Tensor, num_new: int, *, temperature: float = 1.0, seed: int = 0, key_step: int = 64
) -> Tensor:
    """``prompts`` [B, P] int64 and ``num_new`` draws of the target behind each: [B, P + num_new] on the target's device.

    ``key_step``: attention reads the cache up to a multiple of it.
    """
    device, (b, prompt_len) = target.model.device, prompts.shape
    generator = torch.Generator(device).manual_seed(seed)
    length = prompt_len + num_new
    cache = target.new_cache(b, -(-length // key_step) * key_step)
    tokens = torch.zeros(b, length, dtype=torch.int64, device=device)
    tokens[:, :prompt_len] = prompts.to(device)
    slots = torch.arange(b, device=device)
    start = 0
    for end in range(prompt_len, length):
        reach = min(-(-end // key_step) * key_step, cache.context_len)
        hidden = _extend(target, cache, tokens[:, start:end], start, slots, reach)
        probs = (target.local_logits(hidden).float() / temperature).softmax(dim=-1)
        tokens[:, end] = torch.multinomial(probs, 1, generator=generator)[:, 0]
        start = end
    return tokens


def _extend(target: Target, cache, ids: Tensor, start: int, slots: Tensor, reach: int) -> Tensor:
    """Final hidden [B, H] of the last of ``ids`` [B, Q] at positions from ``start`` on."""
    b, q = ids.shape
    positions = torch.arange(start, start + q, device=ids.device).expand(b, q).reshape(-1)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=b,
        num_tokens_per_req=q,
        input_ids=ids.reshape(-1),
        positions=positions,
        req_slots=slots,
        key_limits=positions + 1,
        max_keys=reach,
        num_token_non_padded_cpu=b * q,
    )
    return target.forward(batch, cache).hidden.view(b, q, -1)[:, -1]


@torch.no_grad()
def init_weights(module: nn.Module, seed: int) -> None:
    """What training starts from: N(0, 1/fan_in), the layers' outputs smaller by √(2L), head and embedding small, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    depth = sum(name.endswith("o_proj.weight") for name, _ in module.named_parameters())
    for name, tensor in module.named_parameters():
        if "norm" in name:
            tensor.fill_(1.0)
            continue
        if name.endswith("bias"):
            tensor.zero_()
            continue
        std = tensor.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            std *= (2 * max(1, depth)) ** -0.5
        elif "embed_tokens" in name or "lm_head" in name or name.endswith("markov_w2.weight"):
            std = 0.02
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
