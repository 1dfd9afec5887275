"""Tiny language models of several families: in PyTorch, and as folders that a `Generator` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_cli.extras import import_extra, import_torchvision
from npu_compiler.frontend.decoder_request import BatchRequest, RoundingRequest
from npu_runtime import Generator

__all__ = [
    "VOCABULARY",
    "Decoder",
    "Logits",
    "check_greedy",
    "config",
    "dtype_errors",
    "fill_weights",
    "greedy",
    "import_transformers",
    "make_decoder",
]

VOCABULARY = 320
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_SHARED = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}


def import_transformers() -> Any:
    """transformers, which imports torchvision where it is there, and so needs one that can be imported."""
    import_torchvision()
    return import_extra("transformers", "llm")


def config(family: str, **options: Any) -> Any:
    """A configuration of `transformers` with two layers: ``Qwen2``, ``Llama``, ``Qwen3`` or ``GPT2``."""
    if family == "GPT2":
        sizes: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}
    else:
        sizes = _SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
        sizes |= {"head_dim": 16} if family == "Qwen3" else {}
    return getattr(import_transformers(), f"{family}Config")(**_SHARED | sizes | options)


class Logits(torch.nn.Module):
    """A language model as a function of token ids, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, use_cache=False)[0]


def fill_weights(generator: Generator, byte: int) -> None:
    """Writes one byte all over the weights of a generator that decodes on the device; 0x7F makes them no numbers."""
    weights: Any = generator.model.functions.weights  # type: ignore[attr-defined]
    for buffer in weights.values():
        with buffer.writing() as memory:
            memory[:] = byte


@dataclass(frozen=True)
class Decoder:
    """One model, twice.

    Attributes:
        folder: What extraction made.
        model: In PyTorch, in the same half precision and with the same weights.
    """

    folder: Path
    model: Any

    def logits(self, tokens: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """PyTorch's logits [N, V] of each of N tokens, as float32; computed in `dtype`, or in the model's own."""
        own = self.model.dtype
        with torch.no_grad():
            result = self.model.to(dtype or own)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        self.model.to(own)
        return result  # type: ignore[no-any-return]


def make_decoder(
    place: Path,
    family: str,
    cache_length: int = 128,
    prefill: Sequence[int] = (16,),
    batch: BatchRequest | None = None,
    kv_cache: str | None = None,
    **options: Any,
) -> Decoder:
    """Extracts a model with seeded weights to a folder in `place`; `kv_cache` as `RoundingRequest` has it."""
    source = place / "source"
    import_transformers()
    from npu_compiler.frontend.decoder_source import load_decoder
    from npu_compiler.frontend.language_model import extract_language_model

    config(family, **options).save_pretrained(source)
    rounding = RoundingRequest(kv_cache=kv_cache)
    extract_language_model(
        source, place / "model", cache_length=cache_length, prefill=prefill, batch=batch, rounding=rounding
    )
    return Decoder(place / "model", load_decoder(source, None, 0))


def greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that PyTorch adds to a prompt, the likeliest at each step, with transformers' own cache."""
    transformers = import_transformers()
    from npu_compiler.frontend.cached_decoder import cache_name

    cache, tokens = {cache_name(decoder.model): transformers.DynamicCache()}, list(prompt)
    given = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(count):
            logits = decoder.model(input_ids=given, use_cache=True, **cache).logits[0, -1]
            tokens.append(int(logits.float().argmax()))
            given = torch.tensor([tokens[-1:]])
    return tokens[len(prompt) :]


def dtype_errors(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """How far PyTorch's logits in the model's dtype are from those in float32, for each token."""
    return (decoder.logits(tokens) - decoder.logits(tokens, torch.float32)).abs().amax(-1)


def check_greedy(decoder: Decoder, prompt: Sequence[int], given: Sequence[int]) -> None:
    """Compares tokens with PyTorch's greedy ones.

    They may part where two logits lie closer to each other than the dtype can tell, each by its error.
    """
    expected = greedy(decoder, prompt, len(given))
    first = next((i for i, (a, b) in enumerate(zip(given, expected, strict=True)) if a != b), None)
    if first is None:
        return
    text = [*prompt, *expected[:first]]
    logits, error = decoder.logits(text)[-1], float(dtype_errors(decoder, text)[-1])
    margin = float(logits[expected[first]] - logits[given[first]])
    shown = f"token {first} is {given[first]} and not {expected[first]}: margin {margin:.4f}, error {error:.4f}"
    print(shown)
    assert margin <= 2 * error, shown
