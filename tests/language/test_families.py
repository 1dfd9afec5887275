"""Language models of several families on the device, against PyTorch in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from npu_runtime import Device, Executor, Generator, NPUBuffer, load_weights
from tests.support.decoders import (
    VOCABULARY,
    Decoder,
    check_greedy,
    dtype_errors,
    greedy,
    import_transformers,
    make_decoder,
)

TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 40).tolist()


def device_logits(generator: Generator, tokens: list[int], prompt: int) -> torch.Tensor:
    """The logits of each token from the last of the prompt on: a prefill, then steps of one token."""
    sequence = generator.model.begin()
    rows = [sequence.advance(tokens[:prompt])] + [sequence.advance([token]) for token in tokens[prompt:]]
    arrays = [row.to_numpy() if isinstance(row, NPUBuffer) else row for row in rows]
    return torch.from_numpy(np.stack([array.reshape(-1).astype(np.float32) for array in arrays]))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The lowest Pearson r of rows."""
    return min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Qwen3", "GPT2"])
def test_family(family: str, tmp_path: Path, device: Device) -> None:
    decoder = make_decoder(tmp_path, family)
    generator = Generator(decoder.folder, device)
    given = device_logits(generator, TOKENS, prompt=11)
    expected = decoder.logits(TOKENS, torch.float32)[10:]
    assert correlation(given, expected) > 0.999
    best = expected.topk(2).values
    decided = best[:, 0] - best[:, 1] > 2 * dtype_errors(decoder, TOKENS)[10:]
    assert decided.sum() > len(expected) / 2
    assert torch.equal(given.argmax(-1)[decided], expected.argmax(-1)[decided])


def test_greedy_tokens_are_those_of_pytorch(qwen: Decoder, generator: Generator) -> None:
    prompt = TOKENS[:20]
    assert len(set(greedy(qwen, prompt, 64))) > 8, "a text that repeats itself proves little"
    check_greedy(qwen, prompt, [token.id for token in generator.generate(prompt, 64)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_encoder(attention: str, tmp_path: Path, device: Device) -> None:
    """BERT, which has no cache, takes the plain path: as it is called by default, it runs whole on the device."""
    transformers = import_transformers()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, attn_implementation=attention, **sizes)
    bert = transformers.BertModel(config).eval()
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    mask = torch.ones_like(tokens)
    mask[1, -6:] = 0
    npu_compiler.extract(bert, (tokens, mask), tmp_path / "bert.json")
    program = npu_compiler.compile(tmp_path / "bert.json", device.target)
    weights = load_weights(tmp_path / "bert.safetensors", program, device)
    arrays = dict(zip((spec.name for spec in program.input_specs), (tokens.numpy(), mask.numpy()), strict=True))
    inputs = {spec.name: NPUBuffer.from_numpy(arrays[spec.name], device, spec) for spec in program.input_specs}
    results = Executor(program, device).run(inputs, weights)
    hidden, pooled = (torch.from_numpy(results[spec.name].to_numpy(spec)) for spec in program.output_specs)
    with torch.no_grad():
        expected = bert(tokens, attention_mask=mask)
    visible = mask.bool()
    assert correlation(hidden[visible], expected.last_hidden_state[visible]) > 0.999
    assert correlation(pooled, expected.pooler_output) > 0.999
