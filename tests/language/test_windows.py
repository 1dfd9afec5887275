"""Decoders that see a window of the text, in some layers or in all, and such as have sinks, against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_compiler.frontend.decoder_request import BatchRequest
from npu_runtime import Device, Generator
from npu_text.batching.paged_engine import PagedEngine
from tests.language.test_families import TOKENS, correlation, device_logits
from tests.language.test_paged_engine import Text, go_on, prompt
from tests.support.decoders import check_greedy, make_decoder

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
_GPT_OSS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("Mistral", {}),
    "the second layer": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "sinks and experts": ("GptOss", _EXPERTS | _GPT_OSS),
}
LANES = [(0, 3, [1]), (1, 26, [2, 0])]  # lane, length of the prompt, pages


@pytest.mark.parametrize("name", DECODERS)
def test_a_window_that_is_shorter_than_the_cache(name: str, tmp_path: Path, device: Device) -> None:
    family, options = DECODERS[name]
    decoder = make_decoder(tmp_path, family, cache_length=64, sliding_window=8, **options)
    given = device_logits(Generator(decoder.folder, device), TOKENS, prompt=27)
    expected = decoder.logits(TOKENS, torch.float32)[26:]
    assert correlation(given, expected) > 0.999


def test_lanes_see_a_window(tmp_path: Path, device: Device) -> None:
    batch = BatchRequest((2,), 32, chunks=(16,))
    decoder = make_decoder(tmp_path, "Mistral", 64, (), batch, sliding_window=8, num_hidden_layers=1)
    engine = PagedEngine(decoder.folder, device)
    texts = [Text(engine, lane, prompt(length, lane), pages).fill() for lane, length, pages in LANES]
    go_on(texts, 8)
    for text in texts:
        check_greedy(decoder, text.prompt, text.tokens)
