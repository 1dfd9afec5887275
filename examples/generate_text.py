"""Generates with a small language model: extract, compile, stream. ``python examples/generate_text.py``.

The model has seeded weights and the bytes of UTF-8 as tokens, so that its text is noise; a folder with a trained model
takes the same lines, and brings its own tokenizer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from npu_cli.extras import import_extra, import_torchvision
from npu_runtime import Generator

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


class Bytes:
    """A tokenizer: one token for each byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def main() -> None:
    import_torchvision()  # transformers imports it, where it is there
    import_extra("transformers", "examples")
    from npu_compiler.torch_frontend.language_model import extract_language_model

    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place, "config.json"), Path(place, "model")
        source.write_text(json.dumps(CONFIG))
        extract_language_model(source, folder, cache_length=128, prefill=(16,))
        generator = Generator(folder, tokenizer=Bytes())
        generation = generator.generate("Once upon a time", 40, temperature=0.8, seed=1)
        for token in generation:
            print(token.text, end="", flush=True)
    print(f"\n{generation.timing.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main()
