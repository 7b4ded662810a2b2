"""`DraftBlockProposer`: one draft forward a round, from the anchor to γ draft tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.config import LabConfig
from dspark_lab.device import phase
from dspark_lab.engine.alloc import ScalarSource
from dspark_lab.models.batch import ForwardBatch, ForwardMode
from dspark_lab.models.drafter import Drafter, Proposal
from dspark_lab.models.kvcache import KVCache
from dspark_lab.spec.accept import proposal_lengths


@dataclass(kw_only=True)
class RoundState:
    """The requests of a round on the device, padded to the bucket; padded rows point at the dummy slot with length 0."""

    num_requests: int
    """Real requests; they come first."""
    anchors: Tensor
    """[B] int64: last committed token of each request."""
    seq_lens: Tensor
    """[B] int64: position of the anchor, so also the number of positions in the caches."""
    slots: Tensor
    """[B] int64: slot of the KV caches."""
    seq_lens_cpu: list[int]
    """Host mirror of the real ones."""

    @property
    def bucket(self) -> int:
        return self.anchors.shape[0]


class DraftBlockProposer:
    """Builds the draft batch as SGLang's does (bs·γ tokens, mode TARGET_VERIFY) and runs the drafter on it."""

    def __init__(self, cfg: LabConfig, drafter: Drafter, cache: KVCache, device: torch.device) -> None:
        self.cfg = cfg
        self.drafter = drafter
        self.cache = cache
        self.scalar = ScalarSource(cfg.engine.how, cfg.parallel, device)
        self.gamma = cfg.model.drafter.block_size
        self._columns = torch.arange(self.gamma, device=device)
        self._device = device

    def build_batch(self, state: RoundState) -> ForwardBatch:
        """The draft batch: anchor and γ−1 mask tokens a request; the device scalar comes from the strategy under test."""
        bs, gamma = state.num_requests, self.gamma
        ids = torch.full((state.bucket, gamma), self.cfg.model.drafter.mask_token_id, device=self._device)
        ids[:, 0] = state.anchors
        positions = state.seq_lens[:, None] + self._columns
        limits = (state.seq_lens[:, None] + gamma).expand(-1, gamma)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if bs else ForwardMode.IDLE,
            batch_size=state.bucket,
            num_tokens_per_req=gamma,
            input_ids=ids.flatten(),
            positions=positions.flatten(),
            req_slots=state.slots,
            key_limits=limits.flatten(),
            max_keys=max(state.seq_lens_cpu, default=0) + gamma,
            num_token_non_padded=self.scalar.make(bs * gamma),
            num_token_non_padded_cpu=bs * gamma,
        )
        batch.validate(self.cfg.parallel, mask_padding=self.cfg.engine.mask_padding)
        return batch

    def propose(self, state: RoundState) -> tuple[Proposal, Tensor]:
        """γ draft tokens a request and how many of them to verify ([B] int64)."""
        with phase("dspark::draft"):
            batch = self.build_batch(state)
            if self.cfg.engine.host_work_us:
                busy(self.cfg.engine.host_work_us)
            hidden = self.drafter.forward(batch, self.cache)
            proposal = self.drafter.propose(hidden, state.anchors)
            lengths = proposal_lengths(
                proposal.confidence, self.cfg.engine.confidence_threshold, state.bucket, self.gamma, self._device
            )
        return proposal, lengths


def busy(microseconds: float) -> None:
    """Busy Python for that long: stands for a scheduler's work between the scalar and the next launch."""
    end = time.perf_counter_ns() + int(microseconds * 1000)
    while time.perf_counter_ns() < end:
        pass
