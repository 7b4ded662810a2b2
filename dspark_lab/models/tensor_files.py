"""`TensorFiles`: the tensors of a checkpoint folder by name, in safetensors, opened and read one at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark_lab.errors import LabError
from dspark_lab.models.config_json import read_json
from dspark_lab.models.shards import Shard


class TensorFiles:
    """The tensors of a checkpoint folder by name, opened but not read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.where: dict[str, Any] = {}
        """Tensor name → open file."""
        for path in self._paths():
            file = self._open(path)
            self.where.update(dict.fromkeys(file.keys(), file))
        self.pending = set(self.where)

    def _paths(self) -> list[Path]:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.is_file():
            return [single]
        if not index.is_file():
            raise LabError(f"{self.folder} has neither model.safetensors nor model.safetensors.index.json.")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise LabError(f"{index} has no weight_map from tensor to file.")
        paths = [self.folder / name for name in sorted(set(weight_map.values()))]
        for path in paths:
            if not path.is_file():
                raise LabError(f"{index} names {path.name}, and {self.folder} does not have it.")
        return paths

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self.stack.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as e:
            raise LabError(f"{path} does not read as safetensors (cut short or broken?): {e}") from None

    def copy(self, name: str, tensor: Tensor, shard: Shard | None = None) -> None:
        """The tensor ``name``, or the ``shard`` of it, into ``tensor``."""
        if shard is None:
            self._expect(name, list(tensor.shape))
            tensor.copy_(self._read(name, lambda file: file.get_tensor(name)))
            return
        self._expect(name, shard.whole_shape(tensor.shape))
        for here, there in shard.pieces():
            tensor[here].copy_(self._read(name, lambda file, i=there: file.get_slice(name)[i]))

    def copy_fused(
        self, name: str, tensor: Tensor, expert_ids: tuple[int, ...], num_experts: int, shard: Shard | None
    ) -> None:
        """The slices of ``expert_ids``, or the ``shard`` of each, out of a fused tensor [E, .., ..]."""
        whole = list(tensor.shape[1:]) if shard is None else shard.whole_shape(tensor.shape[1:])
        self._expect(name, [num_experts, *whole])
        pieces = [((slice(None),), (slice(None),))] if shard is None else list(shard.pieces())
        for part, expert in zip(tensor, expert_ids, strict=True):
            for here, there in pieces:
                part[here].copy_(self._read(name, lambda file, i=(expert, *there): file.get_slice(name)[i]))

    def shape(self, name: str, wanted: list[int]) -> list[int]:
        """The shape of the tensor ``name`` in its file; the error where it is missing says the one that is ``wanted``."""
        if name not in self.where:
            raise LabError(f"{self.folder} lacks the tensor {name} {wanted}.")
        return list(self.where[name].get_slice(name).get_shape())

    def _expect(self, name: str, shape: list[int]) -> None:
        self.pending.discard(name)
        found = self.shape(name, shape)
        if found != shape:
            raise LabError(f"{self.folder}: the tensor {name} has shape {found} and must have {shape}.")

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        try:
            value = read(self.where[name])
        except Exception as e:
            raise LabError(f"{self.folder}: the tensor {name} does not read: {e}") from None
        if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
            raise LabError(
                f"{self.folder}: the tensor {name} has dtype {value.dtype}; quantised checkpoints are not read."
            )
        return value

    def refuse_left_over(self) -> None:
        """Raises for tensors nobody asked for; an lm_head beside a tied embedding and stored RoPE tables are known copies."""
        tied = "lm_head.weight" in self.pending and "model.embed_tokens.weight" in self.where
        known = {n for n in self.pending if n.endswith("rotary_emb.inv_freq") or (tied and n == "lm_head.weight")}
        left = sorted(self.pending - known)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise LabError(
                f"{self.folder} has the unexpected tensor {left[0]}{more}: it does not belong to this model."
            )
