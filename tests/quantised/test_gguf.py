"""GGUF's blocks against the numbers that the `gguf` package makes of them, and a whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.gguf import Gguf, GgufFile
from npu_compiler.frontend.checkpoints.gguf_blocks import BLOCKS
from npu_compiler.frontend.coded_layers import CodedWeight
from npu_runtime import Device
from tests.quantised.test_decoders import check
from tests.support.decoders import config, import_transformers

gguf = pytest.importorskip("gguf")

ROWS, COLUMNS = 6, 512


def some_blocks(kind: int, rows: int, columns: int) -> Any:
    """Random bytes of blocks whose half-precision numbers are small; uint8 [rows, bytes]."""
    block = BLOCKS[kind]
    random = np.random.default_rng(kind)
    raw = random.integers(0, 256, (rows, columns // block.size, block.nbytes), np.uint8)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
    if block.name in ("MXFP4", "NVFP4"):  # whose scales are of a byte
        low, high, count = (0, 132, 1) if block.name == "MXFP4" else (0, 0x7F, 4)
        raw[..., :count] = random.integers(low, high, (*raw.shape[:2], count), np.uint8)
        return raw.reshape(rows, -1)
    for start in places.get(block.name, (0, 2) if block.name.endswith("_1") else (0,)):
        number = random.normal(0, 0.01, raw.shape[:2]).astype("<f2")
        raw[..., start : start + 2] = number[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def numbers(coded: CodedMatrix) -> torch.Tensor:
    made: torch.Tensor = CodedWeight(coded.check("weight"), torch.float32, torch.float16)()
    return made


@pytest.mark.parametrize("kind", BLOCKS, ids=[block.name for block in BLOCKS.values()])
def test_blocks_mean_what_the_producer_says(kind: int) -> None:
    raw = some_blocks(kind, ROWS, COLUMNS)
    block = BLOCKS[kind]
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    coded = block.matrix((ROWS, COLUMNS), raw.reshape(ROWS, -1, block.nbytes))
    np.testing.assert_allclose(numbers(coded).numpy(), expected, rtol=1e-6, atol=0 if "FP4" in block.name else 1e-9)


@pytest.mark.parametrize("factor", [0.375, 0.0])
def test_the_scale_of_a_whole_tensor(factor: float, tmp_path: Path) -> None:
    raw = some_blocks(40, ROWS, COLUMNS)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    writer.add_tensor("blk.0.ffn_up.scale", np.array([factor], np.float32))
    writer.add_tensor("blk.0.ffn_up.input_scale", np.array([3.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    if not factor:
        with pytest.raises(
            ExtractionError, match=r"'blk\.0\.ffn_up\.scale': given \[0\.0\], expected one number above"
        ):
            Gguf({}).matrix("model.layers.0.mlp.up_proj", (ROWS, COLUMNS), file)
        return
    coded = Gguf({}).matrix("model.layers.0.mlp.up_proj", (ROWS, COLUMNS), file)
    assert coded is not None
    assert not file.left()
    meant = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4) * np.float32(factor)
    np.testing.assert_allclose(numbers(coded).numpy(), meant, rtol=1e-6, atol=0)


def write(path: Path, family: str) -> Any:
    """A file of a tiny model, with several types of blocks; gives the model with the numbers that they mean."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "rope_theta": 5000.0}
    made = config(family, **sizes, num_hidden_layers=1, tie_word_embeddings=False)
    torch.manual_seed(1)
    model = import_transformers().AutoModelForCausalLM.from_config(made).eval().float()
    writer = gguf.GGUFWriter(path, family.lower())
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(made.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    kinds = iter([8, 12, 14, 2, 13, 3, 12, 14, 8, 6])
    own = {theirs: name for name, theirs in NAMES.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            heads = 4 if ".q_proj" in name else 2 if ".k_proj" in name and family == "Llama" else 0
            heads = heads if family == "Llama" else 0
            stem, end = name.rsplit(".", 1)
            if parameter.ndim == 1:
                parameter.normal_(0.8, 0.1)
                parameter.copy_(parameter.half().float())
                writer.add_tensor(f"{own[stem]}.{end}", parameter.numpy().astype(np.float32))
                continue
            kind = next(kinds)
            raw = some_blocks(kind, *parameter.shape)
            meant = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
            scale = 1.2 * parameter.shape[1] ** -0.5 / meant.std()
            raw = scaled(raw, kind, scale)
            meant = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
            if heads:  # llama.cpp's order: the rows that turn together are neighbours
                size = meant.shape[0] // heads
                order = np.arange(meant.shape[0]).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)
                meant = meant[order]
            parameter.copy_(torch.from_numpy(meant.copy()))
            writer.add_tensor(f"{own[stem]}.{end}", raw, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def scaled(raw: Any, kind: int, factor: float) -> Any:
    """The same blocks, with their half-precision numbers multiplied."""
    block = BLOCKS[kind]
    blocks = raw.reshape(raw.shape[0], -1, block.nbytes).copy()
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for start in places.get(block.name, (0, 2) if block.name.endswith("_1") else (0,)):
        part = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype(np.float32) * factor
        blocks[..., start : start + 2] = part.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(raw.shape)


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **{
        f"blk.0.{short}": f"model.layers.0.{long}"
        for short, long in {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }.items()
    },
}


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_file_becomes_a_model(family: str, tmp_path: Path, device: Device) -> None:
    model = write(tmp_path / "model.gguf", family)
    check(tmp_path / "model.gguf", model, tmp_path / "model", device)


@pytest.mark.parametrize("length", [3, 20, 100, 3000])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "Qwen2")
    (tmp_path / "short.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:length])
    with pytest.raises(ExtractionError, match="is no whole GGUF file"):
        Gguf({}).matrix("model.embed_tokens", (320, 256), GgufFile(tmp_path / "short.gguf"))
