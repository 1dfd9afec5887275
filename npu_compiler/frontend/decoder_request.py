"""What can be refused of a language model's extraction before torch is imported and weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_compiler.artifact.output_file import check_output, same_file
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.gguf import GgufFile
from npu_compiler.frontend.checkpoints.importer import MOST_LAYERS

__all__ = [
    "GGUF",
    "WEIGHTS",
    "BatchRequest",
    "RoundingRequest",
    "allowed_length",
    "check_request",
    "configuration",
    "has_weights",
    "prefill_lengths",
]

WEIGHTS = "model.safetensors"
GGUF = ".gguf"  # the ending of files that hold both a configuration and weights
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_CACHE_LENGTH = 2048
_PREFILL = (128, 512)
_SEEDS = 1 << 64  # as many as torch's generators take


_CHUNKS = (128, 512, 2048)
_PACKS = {512: (2,)}  # more rows are no quicker on a GPU, and fewer are added up otherwise than more of them
_PAGE_STEP = 32  # tokens: the kernels for attention read blocks of positions, none of which lies in two pages
_MOST_LANES = 1024
_MOST_GUESSED = 16


@dataclass(frozen=True)
class RoundingRequest:
    """What functions round to codes of a byte while they run, ``int8`` or ``fp8``; ``16`` for nothing.

    Attributes:
        activations: Inputs of quantised linears; what the checkpoint says when None.
        kv_cache: Keys and values of the cache, with a scale for each head and token; nothing when None.
    """

    activations: str | None = None
    kv_cache: str | None = None


@dataclass(frozen=True)
class BatchRequest:
    """Functions for many texts at once.

    Attributes:
        lanes: How many texts each decode step takes.
        page_tokens: Tokens of a page.
        pages: How many there are; enough for full texts in all lanes when None.
        chunks: Tokens of a prompt that functions take; 128, 512 and 2048 when None, as far as the text may be so long.
        packs: For such a number how many prompts further functions take at once, as far as there are so many lanes;
            when None 2 for 512, where weights and pages are numbers of 16 bits.
        guess: Tokens of each lane that further functions take, the last one and a guess of those that follow; 1 for no
            such functions.
    """

    lanes: Sequence[int]
    page_tokens: int = 128
    pages: int | None = None
    chunks: Sequence[int] | None = None
    guess: int = 1
    packs: Mapping[int, Sequence[int]] | None = None

    def context(self, length: int) -> int:
        """Tokens of a text, whole pages, for a cache of `length` tokens.

        Raises:
            ExtractionError: Something is out of its range.
        """
        size = self.page_tokens
        if not self.lanes or not all(1 <= lanes <= _MOST_LANES for lanes in self.lanes):
            raise ExtractionError(f"given lanes {list(self.lanes)}, expected 1 to {_MOST_LANES} for each function")
        if size < 1 or size % _PAGE_STEP or size > length:
            raise ExtractionError(f"given pages of {size} tokens, expected a multiple of {_PAGE_STEP} up to {length}")
        if self.pages is not None and self.pages < length // size:
            raise ExtractionError(
                f"given {self.pages} pages of {size} tokens, expected at least {length // size}, as one text may take"
            )
        if self.chunks is not None and not all(1 < n <= length for n in self.chunks):
            raise ExtractionError(f"given chunks of {list(self.chunks)} tokens, expected 2 to {length}")
        if not 1 <= self.guess <= _MOST_GUESSED:
            raise ExtractionError(f"given a guess of {self.guess} tokens, expected 1 (none) to {_MOST_GUESSED}")
        return length // size * size

    def all_pages(self, context: int) -> int:
        """How many pages there are."""
        return self.pages if self.pages is not None else max(self.lanes) * context // self.page_tokens

    def shapes(self, context: int, plain: bool) -> dict[str, tuple[int, int, bool]]:
        """By the names of functions: lanes, tokens of each lane, and whether they give no logits.

        Args:
            context: Tokens of a text.
            plain: Whether weights and pages are numbers of 16 bits, of which any number of rows is added up alike.
        """
        chunks = [n for n in _CHUNKS if n <= context] or [context] if self.chunks is None else sorted(set(self.chunks))
        lanes = sorted(set(self.lanes))
        decode = {f"decode_{count}": (count, 1, False) for count in lanes}
        if self.guess > 1:
            decode |= {f"check_{count}": (count, self.guess, False) for count in lanes}
        packs = self.packs if self.packs is not None else _PACKS if plain else {}
        many = {(n, k): f"chunk_{n}x{k}" for n in chunks for k in packs.get(n, ()) if 1 < k <= lanes[-1]}
        decode |= {f"chunk_{n}": (1, n, True) for n in chunks}
        return decode | {name: (k, n, True) for (n, k), name in many.items()}


def check_request(
    source: Path,
    folder: Path,
    cache: int | None = None,
    prefill: Sequence[int] | None = None,
    seed: int = 0,
    batch: BatchRequest | None = None,
) -> None:
    """Checks the arguments of `extract_language_model` against each other and the configuration's file.

    The configuration as transformers reads it may refuse more: it knows the defaults of each kind of model.

    Raises:
        ExtractionError: There is no such source or configuration, an argument is out of its range, or the folder is
            the source's own, a file, or leads to files of the source.
    """
    config = configuration(source)
    known = config.get("max_position_embeddings")
    length = allowed_length(known if isinstance(known, int) else None, cache)
    prefill_lengths(prefill, length)
    if batch is not None:
        batch.context(length)
    if not 0 <= seed < _SEEDS:
        raise ExtractionError(f"given the seed {seed}, expected 0 to {_SEEDS - 1}")
    _check_folder(_folder_of(source), folder)


def allowed_length(known: int | None, requested: int | None) -> int:
    """The most tokens of a text.

    Args:
        known: How many positions the model knows; None for any number.
        requested: What the caller wants, if anything.
    """
    most = known or requested or _CACHE_LENGTH
    length = min(_CACHE_LENGTH, most) if requested is None else requested
    if not 1 <= length <= most:
        raise ExtractionError(f"given a cache of {length} tokens, expected 1 to {most}, the positions the model knows")
    return length


def prefill_lengths(requested: Sequence[int] | None, cache: int) -> list[int]:
    """Lengths of prompts that get a function, ascending, for a cache of `cache` tokens."""
    if requested is None:
        return [n for n in _PREFILL if n <= cache]
    if not all(1 < n <= cache for n in requested):
        raise ExtractionError(f"given prefill lengths {list(requested)}, expected 2 to {cache}, the cache's")
    return sorted(set(requested))


def configuration(source: Path) -> dict[str, Any]:
    """The content of a folder's ``config.json``, or of such a file; what a GGUF file says in its place.

    Raises:
        ExtractionError: There is none, or it is no JSON object.
    """
    if source.suffix == GGUF and source.is_file():
        return GgufFile(source).configuration()
    path = source / "config.json" if source.is_dir() else source
    expected = "expected a Hugging Face folder or config.json of a causal language model"
    if not path.is_file():
        missing = f"a folder without {path.name}" if source.is_dir() else "which does not exist"
        if not source.exists() and len(source.parts) == 2 and not source.is_absolute():  # as the hub names models
            expected += f"; download one first: hf download {source} --local-dir {source.name}"
        raise ExtractionError(f"given '{source}', {missing}; {expected}")
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ExtractionError(f"cannot read '{path}': {error.strerror}; {expected}") from error
    except (ValueError, RecursionError) as error:
        raise ExtractionError(f"given '{path}', which is not JSON ({error}); {expected}") from error
    if not isinstance(config, dict):
        raise ExtractionError(f"given '{path}', which holds a {type(config).__name__}; {expected}")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ExtractionError(f"given '{path}' with {layers} layers, expected at most {MOST_LAYERS}")
    return config


def has_weights(source: Path) -> bool:
    """Whether a source brings weights; a configuration alone, also in a folder, brings none."""
    if not source.is_dir():
        return source.suffix == GGUF
    return any(next(source.glob(pattern), None) is not None for pattern in _WEIGHT_FILES)


def _folder_of(source: Path) -> Path:
    return source if source.is_dir() else source.parent


def _check_folder(origin: Path, folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ExtractionError(f"cannot write to '{folder}': it is no folder; choose another")
    if same_file(origin, folder):
        raise ExtractionError(
            f"cannot write to '{folder}': the model is read from it, and its weights would be overwritten; choose "
            "another folder"
        )
    check_output(folder / WEIGHTS, (path for path in origin.iterdir() if path.is_file()), ExtractionError)
