"""DeepSpec's own evaluation loop on given models: nothing of it is vendored, its checkout's path comes from whoever calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

MODULE = "deepspec.eval.dspark.evaluator"


def check_checkout(path: Path) -> None:
    """Raises `FileNotFoundError` unless ``path`` is a checkout of DeepSpec."""
    if not (path / "deepspec" / "eval").is_dir():
        raise FileNotFoundError(f"{path} is no checkout of deepseek-ai/DeepSpec: it has no folder deepspec/eval.")


def import_deepspec(path: Path) -> Any:
    """The module with DeepSpec's DSpark evaluator, from the checkout at ``path``. Raises `FileNotFoundError` where it is none."""
    check_checkout(path)
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    from importlib import import_module

    _crop_as_before()
    return import_module(MODULE)


def _crop_as_before() -> None:
    """Their loop crops a cache to a length, which transformers takes up to 5.10 at least and refuses in 5.24; to remove so many is legal in both."""
    from transformers import DynamicCache

    crop = DynamicCache.crop
    if getattr(crop, "to_length", False):
        return

    def to_length(self: Any, length: int) -> None:
        if (extra := self.get_seq_length() - length) > 0:
            crop(self, -extra)

    to_length.to_length = True  # pyright: ignore[reportFunctionMemberAccess]
    DynamicCache.crop = to_length


class Loop:
    """Their proposing, verifying and updating, one prompt at a time; ``record`` is called with each round's proposal.

    Their evaluator's constructor starts a process group and reads a data set: neither is needed for one prompt, so the object is
    made without it. The recorder of confidences, which watches and decides nothing, stays off.
    """

    def __init__(
        self,
        path: Path,
        target: Any,
        drafter: Any,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        confidence_threshold: float = 0.0,
    ) -> None:
        evaluator = import_deepspec(path).Qwen3DSparkEvaluator
        self.evaluator = evaluator.__new__(evaluator)
        self.evaluator.args = SimpleNamespace(
            max_new_tokens=max_new_tokens, temperature=temperature, confidence_threshold=confidence_threshold
        )
        self.evaluator.target_model, self.evaluator.draft_model = target, drafter
        self.evaluator.device = next(target.parameters()).device
        self.evaluator.confidence_head_recorder = None

    def generate(self, prompt: list[int]) -> Any:
        """Their result for ``prompt``: ``output_ids`` [1, N + new], ``acceptance_lengths``, ``proposal_lengths``. No stop tokens."""
        ids = torch.tensor([prompt], device=self.evaluator.device)
        return self.evaluator.generate_one_sample(input_ids=ids, stop_token_ids=None)
