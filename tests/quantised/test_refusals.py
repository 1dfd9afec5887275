"""Checkpoints that are damaged, or described otherwise than they are: what was found, and what was expected."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.formats import importer_of
from npu_compiler.frontend.checkpoints.gguf import GgufFile
from npu_compiler.frontend.decoder_source import load_decoder
from tests.quantised import encoders
from tests.quantised.test_decoders import GROUP, all_linears, compressed, section
from tests.quantised.test_importers import imported, weight
from tests.support.quantised import write_checkpoint

Tensors = dict[str, torch.Tensor]
PLACE = "model.layers.0.mlp.up_proj"


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[f"{PLACE}.{name}"]

    return change


def with_(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{PLACE}.{name}"] = make(tensors[f"{PLACE}.{name}"]).contiguous()

    return change


def with_number(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(scales: torch.Tensor) -> torch.Tensor:
        scales[3, 1] = value
        return scales

    return change


def with_more(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


DAMAGES: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "a scale is missing": (without("weight_scale"), rf"'{PLACE}\.weight_scale' is missing from the checkpoint"),
    "codes are missing": (without("weight_packed"), rf"'{PLACE}\.weight' is missing from the checkpoint"),
    "a norm is missing": (
        lambda tensors: tensors.__delitem__("model.norm.weight"),
        r"'model\.norm\.weight' is missing from the checkpoint",
    ),
    "codes of another shape": (
        with_("weight_packed", lambda codes: codes[:, :-1]),
        rf"'{PLACE}\.weight_packed': given the shape \[128, 7\], expected \[128, 8\]",
    ),
    "scales of another shape": (
        with_("weight_scale", lambda scales: scales[:, :1]),
        rf"'{PLACE}\.weight_scale': given the shape \[128, 1\], expected \[128, 2\]",
    ),
    "codes of another type": (
        with_("weight_packed", lambda codes: codes.to(torch.int16)),
        rf"'{PLACE}\.weight_packed': given int16, expected int32 or uint32",
    ),
    "a scale of zero": (
        with_("weight_scale", with_number(0.0)),
        rf"'{PLACE}\.weight_scale': given the scale 0\.0 at \[3, 1\]",
    ),
    "an infinite scale": (with_("weight_scale", with_number(float("inf"))), r"given the scale inf at \[3, 1\]"),
    "a scale that is NaN": (with_("weight_scale", with_number(float("nan"))), r"given the scale nan at \[3, 1\]"),
    "two formats at once": (
        with_more(f"{PLACE}.qweight", torch.zeros(8, 128, dtype=torch.int32)),
        rf"given '{PLACE}\.qweight' and '{PLACE}\.weight_packed', expected the weight in one format",
    ),
    "a tensor of another format": (
        with_more("model.layers.1.mlp.up_proj.g_idx", torch.zeros(64)),
        r"given the tensors 'model\.layers\.1\.mlp\.up_proj\.g_idx', which the model and the format",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    encode = all_linears(lambda given: encoders.pack_quantized(given, 4, GROUP, True, torch.bfloat16))
    write_checkpoint(folder, compressed(4, symmetric=True), encode, torch.bfloat16, num_hidden_layers=2)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_written(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from npu_compiler.frontend.language_model import extract_language_model

    change, message = DAMAGES[damage]
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ExtractionError, match=message):
        extract_language_model(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ignore": ["re:("]}, "unterminated subpattern"),
        ({"ignore": [7]}, "unexpected types or values"),
        ({"config_groups": {"a": {"targets": 7}}}, "unexpected types or values"),
    ],
)
def test_a_configuration_of_other_types(change: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with pytest.raises(ExtractionError, match=message):
        load_decoder(tmp_path, None, 0)
    config["num_hidden_layers"] = 1 << 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExtractionError, match="with 1099511627776 layers, expected at most 4096"):
        load_decoder(tmp_path, None, 0)


def gptq_tensors(**changed: torch.Tensor) -> Tensors:
    return {**encoders.gptq(weight(64), 4, 64, torch.float16)[0], **changed}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            section("gptq", bits=4, group_size=100),
            gptq_tensors(),
            r"'layer\.qweight': given groups of 100, expected a div",
        ),
        (
            section("gptq", bits=5, group_size=64),
            {},
            r"given bits=5 in the quantisation's configuration, expected 2 or 3",
        ),
        (section("gptq", bits=4, group_size=None), {}, r"given group_size=None in the quantisation's configuration"),
        (
            section("gptq", bits=4, group_size=64),
            gptq_tensors(g_idx=torch.zeros(256, dtype=torch.int32)),
            r"'layer\.g_idx': given groups of different sizes, expected 64 columns in each",
        ),
        (
            section("gptq", bits=4, group_size=64),
            gptq_tensors(g_idx=torch.full((256,), 1 << 60)),
            r"'layer\.g_idx': given groups of different sizes, expected 64 columns in each",
        ),
        (section("compressed-tensors", config_groups={"a": {}}, ignore=7), {}, r"the quantisation: .*unexpected types"),
        (section("awq", bits=8), {}, r"given bits=8 in the quantisation's configuration, expected 4"),
        (section("awq", version="gemv_fast"), {}, r"given version='gemv_fast'.*expected 'gemm' or 'gemv'"),
        (section("hqq"), {}, r"given weights quantised by 'hqq', expected one of awq, bitsandbytes"),
        (section("fp8", weight_block_size=[128]), {}, r"given weight_block_size=\[128\], expected rows and columns"),
        (section("compressed-tensors", format="mxfp6-e3m2"), {}, r"given format='mxfp6-e3m2'"),
        (section("compressed-tensors", format="pack-quantized"), {}, r"given config_groups=None, expected what each"),
        (section("bitsandbytes"), {}, r"given neither load_in_4bit nor load_in_8bit"),
        ({"quantization": {"bits": 4}}, {}, r"given the quantisation .*, expected its method, or bits and group size"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "codebook"}},
            {},
            r"given mode='codebook'.*expected 'affine' or 'mxfp4'",
        ),
    ],
)
def test_what_no_form_has_is_refused(config: dict[str, Any], tensors: Tensors, message: str) -> None:
    with pytest.raises(ExtractionError, match=message):
        importer_of(config) if not tensors else imported(config, tensors, (64, 256))


def gguf_file(*tensors: tuple[str, tuple[int, ...], int], **values: tuple[int, bytes]) -> bytes:
    """A file of GGUF without data: names, sizes and places of tensors; values by name, with their types."""

    def text(name: str) -> bytes:
        return struct.pack("<Q", len(name)) + name.encode()

    values = {"general.architecture": (8, text("llama")), **values}
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    parts += [text(name) + struct.pack("<I", kind) + value for name, (kind, value) in values.items()]
    parts += [
        text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, place) for name, sizes, place in tensors
    ]
    return b"".join(parts)


EMBEDDING = ("token_embd.weight", (64, 32), 0)
LAYERS = {"llama.block_count": (12, struct.pack("<d", float("inf")))}
SIZE = {"llama.attention.head_count": (4, struct.pack("<I", 4)), "llama.feed_forward_length": (4, bytes(4))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_file(("token_embd.weight", (), 0)), "has 0 dimensions"),
        (gguf_file(("token_embd.weight", (0, 1 << 63), 0)), "has the sizes"),
        (gguf_file(EMBEDDING, EMBEDDING), "two tensors have one name"),
        (gguf_file(("token_embd.weight", (64,), 0)), r"has the shape \[64\]"),
        (gguf_file(EMBEDDING, **SIZE, **LAYERS), "given inf as 'llama.block_count', expected 0 to 4096"),
        (gguf_file(EMBEDDING, **{"llama.feed_forward_length": (9, bytes(12))}), "given 'a list of 0' as"),
    ],
)
def test_a_file_of_gguf_that_cannot_be(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ExtractionError, match=message):
        GgufFile(tmp_path / "model.gguf").configuration()


def test_a_code_outside_of_its_codebook() -> None:
    state = torch.tensor(list(json.dumps({"blocksize": 64, "shape": [48, 256]}).encode()), dtype=torch.uint8)
    given = {"weight": torch.zeros(48 * 128, 1, dtype=torch.uint8), "weight.absmax": torch.ones(192)}
    given |= {"weight.quant_map": torch.ones(9), "weight.quant_state.bitsandbytes__nf4": state}
    with pytest.raises(ExtractionError, match=r"'layer\.weight\.quant_map': given the shape \[9\], expected \[16\]"):
        imported(section("bitsandbytes", load_in_4bit=True), given)


def test_pickled_weights_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ExtractionError, match=r"without \.safetensors files"):
        load_decoder(tmp_path, None, 0)
