"""Folders of Hugging Face to IR: their weights, data types, tokenizers and caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.decoder_request import prefill_lengths
from npu_runtime import Device, Generator, NPUBuffer
from tests.support.decoders import Decoder, config, import_transformers


def checkpoint(folder: Path, family: str = "Qwen2", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model with transformers' own random weights, saved to `folder`."""
    torch.manual_seed(1)
    model = import_transformers().AutoModelForCausalLM.from_config(config(family, **options), dtype=dtype).eval()
    model.save_pretrained(folder, max_shard_size="50kB")
    return model


def extract(source: Path, folder: Path, **options: Any) -> GenerationSpec:
    from npu_compiler.frontend.language_model import extract_language_model

    chosen: dict[str, Any] = {"cache_length": 64, "prefill": (16,)} | options
    return extract_language_model(source, folder, **chosen)


def dtypes(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def test_a_checkpoint_in_shards(tmp_path: Path, device: Device) -> None:
    model = checkpoint(tmp_path / "source")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    spec = extract(tmp_path / "source", tmp_path / "model")
    assert spec.dtype == "bfloat16"
    logits = Generator(tmp_path / "model", device).model.begin().advance([3, 1, 4, 1, 5])
    assert isinstance(logits, NPUBuffer)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].numpy()
    given = logits.to_numpy().astype(np.float32).reshape(-1)
    assert np.corrcoef(given, expected)[0, 1] > 0.999


def test_what_stays_float32(qwen: Decoder) -> None:
    """Parameters are bfloat16; frequencies, from which angles at far positions are made, are not."""
    kinds = dtypes(qwen.folder)
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    }
    assert set(kinds.values()) == {"BF16", "F32"}


def test_tied_weights_are_written_once(qwen: Decoder) -> None:
    names = dtypes(qwen.folder)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_checkpoint_in_float16_stays_so(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source", dtype=torch.float16)
    assert extract(tmp_path / "source", tmp_path / "model").dtype == "float16"
    assert extract(tmp_path / "source", tmp_path / "other", dtype="bfloat16").dtype == "bfloat16"


def test_seeds(tmp_path: Path) -> None:
    config("Llama").save_pretrained(tmp_path / "source")
    contents = []
    for number, seed in enumerate((5, 5, 6)):
        extract(tmp_path / "source", tmp_path / str(number), seed=seed)
        contents.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_functions_share_names_and_weights(qwen: Decoder) -> None:
    spec = GenerationSpec.load(qwen.folder)
    irs = {name: json.loads((qwen.folder / step.ir).read_text()) for name, step in spec.functions.items()}
    written = dtypes(qwen.folder).keys()
    for ir in irs.values():
        assert {entry["name"] for entry in ir["weights"]} == written
    assert [step.length for step in spec.functions.values()] == [16, 48, 1]
    assert spec.cache_shapes == ((1, 2, 128, 16),) * 4


def test_names_come_from_the_graph(qwen: Decoder) -> None:
    spec = GenerationSpec.load(qwen.folder)
    for step in spec.functions.values():
        ir = json.loads((qwen.folder / step.ir).read_text())
        inputs = [step.tokens, step.positions, *(given for given, _ in step.caches)] + (
            [step.last] if step.last else []
        )
        assert [entry["name"] for entry in ir["graph_inputs"]] == inputs
        outputs = [step.logits, *(updated for _, updated in step.caches)]
        assert [entry["name"] for entry in ir["graph_outputs"]] == outputs


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    config("GPT2").save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    extract(tmp_path / "source", tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("ids", "expected"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))], ids=["none", "one", "several"])
def test_stop_tokens(tmp_path: Path, ids: Any, expected: tuple[int, ...]) -> None:
    config("Qwen2", eos_token_id=ids).save_pretrained(tmp_path / "source")
    assert extract(tmp_path / "source", tmp_path / "model", prefill=()).stop_ids == expected


def test_the_default_cache_is_what_the_model_knows(tmp_path: Path) -> None:
    config("GPT2").save_pretrained(tmp_path / "source")
    spec = extract(tmp_path / "source", tmp_path / "model", cache_length=None, prefill=None)
    assert spec.cache_length == 256
    assert sorted(spec.functions) == ["decode", "prefill_128"]


def test_prompts_may_fill_the_cache_and_no_more() -> None:
    assert prefill_lengths((8, 2, 8), 8) == [2, 8]
    assert prefill_lengths(None, 128)[-1] == 128
    for refused in ((9,), (1,), (4, 0)):
        with pytest.raises(ExtractionError, match="expected 2 to 8"):
            prefill_lengths(refused, 8)
