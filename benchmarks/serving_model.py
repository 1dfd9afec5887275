"""Folders to serve whose weights are random: a small one, and Qwen2.5-1.5B by its configuration."""

from __future__ import annotations

import json
import tempfile
from itertools import islice, product
from pathlib import Path
from string import ascii_letters
from typing import Any

from benchmarks.decoder_sizes import QWEN
from tests.support.serving import CHAT

__all__ = ["add_tokenizer", "make_qwen", "make_small"]

_LANES = (1, 8, 32, 64)  # on an H200 steps of 4 and of 16 take longer than those of 8 and of 32


def make_small(folder: Path, clients: int) -> None:
    """A Qwen2 of two layers, for so many texts of 512 tokens."""
    from npu_compiler.frontend.decoder_request import BatchRequest
    from tests.support.decoders import config

    batch = BatchRequest((1, clients), page_tokens=32, chunks=(32,))
    _make(folder, config("Qwen2", max_position_embeddings=512), 512, batch)


def make_qwen(folder: Path) -> None:
    """Qwen2.5-1.5B in bfloat16, for up to 64 texts of 2,048 tokens: 3 GB."""
    from npu_compiler.frontend.decoder_request import BatchRequest
    from tests.support.decoders import import_transformers

    sizes: dict[str, Any] = QWEN | {"dtype": "bfloat16", "architectures": ["Qwen2ForCausalLM"]}
    _make(folder, import_transformers().Qwen2Config(**sizes), 2048, BatchRequest(_LANES, chunks=(128, 512)))


def _make(folder: Path, config: Any, context: int, batch: Any) -> None:
    from npu_compiler.frontend.language_model import extract_language_model

    with tempfile.TemporaryDirectory() as source:
        config.save_pretrained(source)
        extract_language_model(source, folder, cache_length=context, prefill=(batch.chunks[0],), batch=batch)
    add_tokenizer(folder, config.vocab_size)


def add_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer, whose tokens are the bytes and then words of letters, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|im_end|>", "<|im_start|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(word) for length in (2, 3, 4) for word in product(ascii_letters, repeat=length))
    names = [*letters, *islice(words, vocabulary - len(letters) - len(special))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
