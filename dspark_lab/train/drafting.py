"""`DrafterTask`: a drafter learns to continue blocks as its frozen target would."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark_lab.models.decoder import Target
from dspark_lab.models.drafter import Drafter
from dspark_lab.models.eagle import EagleDrafter
from dspark_lab.spec.loss import dspark_loss
from dspark_lab.train.anchors import draw_anchors, label_positions
from dspark_lab.train.blocks import block_forward
from dspark_lab.train.data import TokenData
from dspark_lab.train.states import TargetStates
from dspark_lab.train.trainer import Recipe


class DrafterTask:
    """Embedding and LM head of the drafter stay as they are; all else is trained. Everything is on the drafter's device."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | EagleDrafter,
        data: TokenData,
        recipe: Recipe,
        states: TargetStates,
    ) -> None:
        self.target, self.model, self.recipe, self.states = target, drafter, recipe, states
        self.data = data.to(drafter.device)
        drafter.requires_grad_(True).train()
        drafter.embed_tokens.requires_grad_(False)
        drafter.lm_head.requires_grad_(False)

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars by name, of ``tokens`` and ``mask`` [B, S], ``noise`` [B, S − 1] and what the target's states add."""
        tokens, gamma = inputs["tokens"], self.model.block_size
        anchors = draw_anchors(inputs["mask"], self.recipe.num_anchors, gamma, inputs["noise"])
        aux, hidden = self.states.of(tokens, inputs)
        out = block_forward(self.model, tokens, aux, anchors)
        labels = label_positions(anchors.positions, gamma).clamp(max=tokens.shape[1] - 1)
        with torch.no_grad():
            places = (labels - 1).flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
            target_logits = self.target.local_logits(hidden.gather(1, places)).view(*labels.shape, -1)
        true = tokens.gather(1, labels.flatten(1)).view_as(labels)
        loss = dspark_loss(out.logits, target_logits, true, anchors.mask, out.confidence_logits, self.recipe.weights)
        return dict(vars(loss))

    def inputs_of(self, step: int) -> dict[str, Tensor]:
        """Sequences, masks and the noise that draws anchors."""
        rows = self.data.rows(step, self.recipe.batch_size, self.recipe.seed)
        tokens, mask = self.data.batch(rows)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        noise = torch.rand(len(rows), self.data.seq_len - 1, generator=generator).to(tokens.device)
        return {"tokens": tokens, "mask": mask, "noise": noise, **self.states.inputs(rows)}
