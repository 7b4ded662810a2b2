"""Tensor parallelism: which part of a whole tensor a rank holds, and the layers that put the parts together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_lab.ep.groups import RankGroup


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``rank`` of ``size`` of a tensor, cut along ``dim``; parts differ by one at most where ``size`` does not divide."""

    dim: int
    whole: int
    """Length of ``dim`` in the whole tensor (in each of its ``blocks``)."""
    rank: int
    size: int
    blocks: int = 1
    """Tensors that lie one behind the other along ``dim``, each cut alike: gate above up."""

    @property
    def start(self) -> int:
        return self.whole * self.rank // self.size

    @property
    def stop(self) -> int:
        return self.whole * (self.rank + 1) // self.size

    @property
    def num(self) -> int:
        """Length of this rank's part (of one block)."""
        return self.stop - self.start

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the whole tensor, from the ``shape`` of this part."""
        whole = list(shape)
        whole[self.dim] = self.whole * self.blocks
        return whole

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Index of each piece in this part, and in the whole tensor."""
        before = (slice(None),) * self.dim
        for block in range(self.blocks):
            here, there = block * self.num, block * self.whole + self.start
            yield (*before, slice(here, here + self.num)), (*before, slice(there, there + self.num))

    def copy(self, part: Tensor, whole: Tensor) -> None:
        """Fills ``part`` from the ``whole`` tensor."""
        for here, there in self.pieces():
            part[here].copy_(whole[there])


def cut(parameter: Tensor, shard: Shard) -> None:
    """Notes on ``parameter`` which part of its whole tensor it is; of stacked experts, of each one's."""
    setattr(parameter, "shard", shard)  # noqa: B010


def shard_of(parameter: Tensor) -> Shard | None:
    """What `cut` noted; None for a parameter that every rank holds whole."""
    return getattr(parameter, "shard", None)


def copy_whole(parameter: Tensor, whole: Tensor) -> None:
    """Fills a parameter, cut or not, from the whole tensor."""
    shard = shard_of(parameter)
    if shard is None:
        parameter.copy_(whole)
    else:
        shard.copy(parameter, whole)


class UnsetLinear(nn.Linear):
    """A linear layer made without weights being drawn. (`torch.nn.utils.skip_init` imports the compiler: two seconds a process.)"""

    def reset_parameters(self) -> None:
        pass


class UnsetEmbedding(nn.Embedding):
    """A table made without weights being drawn."""

    def reset_parameters(self) -> None:
        pass


def linear(in_features: int, out_features: int, *, bias: bool = False, **factory: Any) -> nn.Linear:
    """A linear layer whose weights are not set yet; every rank holds it whole."""
    return UnsetLinear(in_features, out_features, bias=bias, **factory)


def embedding(rows: int, width: int, **factory: Any) -> nn.Embedding:
    """A table whose weights are not set yet; every rank holds it whole."""
    return UnsetEmbedding(rows, width, **factory)


def column_linear(
    in_features: int, out_features: int, tp: RankGroup, *, bias: bool = False, **factory: Any
) -> nn.Linear:
    """A linear layer of which each rank computes its part of the outputs; nothing is sent."""
    shard = Shard(dim=0, whole=out_features, rank=tp.rank, size=tp.size)
    layer = linear(in_features, shard.num, bias=bias, **factory)
    if tp.size > 1:
        cut(layer.weight, shard)
        if bias:
            cut(layer.bias, shard)
    return layer


class RowLinear(nn.Module):
    """A linear layer of which each rank has its part of the inputs; one all-reduce adds the outputs up."""

    def __init__(
        self, in_features: int, out_features: int, tp: RankGroup, *, bias: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.tp = tp
        shard = Shard(dim=1, whole=in_features, rank=tp.rank, size=tp.size)
        self.weight = nn.Parameter(torch.empty(out_features, shard.num, **factory))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
        if tp.size > 1:
            cut(self.weight, shard)

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = self.tp.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias  # once, not once a rank


class Vocabulary:
    """One rank's range of token ids, and what the ranks do to agree on a token."""

    def __init__(self, size: int, tp: RankGroup) -> None:
        self.tp = tp
        self.shards = [Shard(dim=0, whole=size, rank=rank, size=tp.size) for rank in range(tp.size)]
        self.first, self.num = self.shards[tp.rank].start, self.shards[tp.rank].num

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's columns ``logits`` [.., num] to all [.., V]."""
        if self.tp.size == 1:
            return logits
        width = max(s.num for s in self.shards)
        parts = self.tp.all_gather(F.pad(logits, (0, width - self.num)))
        return torch.cat([part[..., : s.num] for part, s in zip(parts, self.shards, strict=True)], dim=-1)

    def argmax(self, logits: Tensor) -> Tensor:
        """This rank's columns ``logits`` [.., num] to the best token over all ranks [..]; the lowest id of equals.

        Only each rank's best value and id are sent, as the bits of two int32.
        """
        if self.tp.size == 1:
            return logits.argmax(dim=-1)
        values, ids = logits.max(dim=-1)
        best = torch.stack((values.float().view(torch.int32), (ids + self.first).int()))
        values, ids = self.tp.all_gather(best).unbind(1)
        winner = values.view(torch.float32).argmax(dim=0, keepdim=True)  # the first of equals: the lowest rank and id
        return ids.gather(0, winner)[0].long()


class VocabEmbedding(nn.Module):
    """Token embedding by vocabulary: each rank looks up its own ids, one all-reduce gives every rank all rows."""

    def __init__(self, vocab: Vocabulary, width: int, **factory: Any) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(vocab.num, width, **factory))
        if vocab.tp.size > 1:
            cut(self.weight, vocab.shards[vocab.tp.rank])

    def forward(self, ids: Tensor) -> Tensor:
        if self.vocab.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.vocab.first
        mine = (local >= 0) & (local < self.vocab.num)
        # Selected, not multiplied: row 0 stands in for the others' ids and may hold anything.
        rows = torch.where(mine[..., None], F.embedding(torch.where(mine, local, 0), self.weight), 0.0)
        return self.vocab.tp.all_reduce(rows)
