"""An encoder behind /v1/embeddings, by the official client, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.errors import InputError
from npu_runtime import Device
from tests.support.serving import make_tokenizer, running

pytestmark = pytest.mark.usefixtures("openai")
LENGTH = 32


class Encoder(torch.nn.Module):
    """Embeddings, and a layer that sees the tokens of the text alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(300, 64), torch.nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.words(input_ids)
        mask = attention_mask[..., None].to(states.dtype)
        mean = (states * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return torch.tanh(self.layer(states) + mean)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def client(openai: Any, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    for module in ("fastapi", "prometheus_client"):
        pytest.importorskip(module)
    from npu_text.serving.server import ServerOptions, open_app

    folder = tmp_path_factory.mktemp("encoder")
    example = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long), "attention_mask": torch.ones(1, LENGTH).long()}
    npu_compiler.extract(encoder, example, folder / "encoder.json")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    with running(open_app(folder, Device("software-metal"), ServerOptions(name="encoder"))) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)


def test_vectors_are_those_of_pytorch(client: Any, encoder: Encoder) -> None:
    tokenizer = make_tokenizer()
    texts = ["Hello", "A longer text, in words"]
    answer = client.embeddings.create(model="encoder", input=texts)
    for text, entry in zip(texts, answer.data, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            expected = encoder.double()(ids, torch.ones_like(ids))[0].mean(0)
        expected = expected / expected.norm()
        assert np.abs(np.array(entry.embedding) - expected.numpy()).max() < 5e-3
    assert answer.usage.prompt_tokens == sum(len(text) for text in texts)
    as_floats = client.embeddings.create(model="encoder", input=tokenizer.encode(texts[0]).ids, encoding_format="float")
    assert as_floats.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)


@pytest.mark.parametrize("text", ["x" * (LENGTH + 1), "", [999]])
def test_texts_that_do_not_fit_are_refused(openai: Any, client: Any, text: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="encoder", input=text)


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    from npu_text.serving.server import ServerOptions, open_app

    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="neither a language model"):
        open_app(tmp_path, Device("software-metal"), ServerOptions())
