"""Quantised checkpoints from the folder to logits on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_runtime import Device, Generator
from tests.quantised import encoders
from tests.support.quantised import Encoded, Encoder, extracted, write_checkpoint

TOKENS = [5, 17, 40, 3, 8, 250, 31, 77]
GROUP = 32


def compressed(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"quantization_config": section | {"ignore": ["lm_head"]}}


def check(source: Path, model: Any, target: Path, device: Device, prefill: tuple[int, ...] = ()) -> None:
    """Compares decode steps, after a prefill if there is one, with PyTorch's logits in float32."""
    decoder = extracted(source, model, target, prefill=prefill)
    sequence = Generator(decoder.folder, device).model.begin()
    rows: list[Any] = [sequence.advance(TOKENS[:-1]), sequence.advance(TOKENS[-1:])]
    expected = decoder.logits(TOKENS, torch.float32)[-2:].numpy()
    for row, wanted in zip(rows, expected, strict=True):
        given = np.asarray(row).astype(np.float32).reshape(-1)
        assert np.corrcoef(given, wanted)[0, 1] > 0.9995


def all_linears(encode: Callable[[torch.Tensor], Encoded]) -> Encoder:
    """Quantises what the formats for linears do: all but the output layer and the embedding."""
    return lambda name, weight: None if name in ("lm_head", "model.embed_tokens") else encode(weight)


def section(method: str, **options: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **options}}


MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
ORDER = np.random.default_rng(0).permutation
FORMATS: dict[str, tuple[dict[str, Any], Encoder, torch.dtype, dict[str, Any]]] = {
    "pack-quantized": (
        compressed(4, symmetric=False),
        all_linears(lambda weight: encoders.pack_quantized(weight, 4, GROUP, False, torch.bfloat16)),
        torch.bfloat16,
        {},
    ),
    "gptq in another order": (
        section("gptq", bits=4, group_size=GROUP, desc_act=True),
        all_linears(lambda weight: encoders.gptq(weight, 4, GROUP, torch.float16, order=ORDER(weight.shape[1]))),
        torch.float16,
        {},
    ),
    "awq": (
        section("awq", bits=4, group_size=GROUP, version="GEMM", zero_point=True),
        all_linears(lambda weight: encoders.awq(weight, GROUP, torch.float16)),
        torch.float16,
        {"tie_word_embeddings": False},
    ),
    "fp8 in blocks": (
        section("fp8", fmt="e4m3", weight_block_size=[48, 40], activation_scheme="dynamic"),
        all_linears(lambda weight: encoders.block_fp8(weight, (48, 40), torch.bfloat16)),
        torch.bfloat16,
        {"family": "Qwen3"},
    ),
    "mxfp4": (
        section(
            "compressed-tensors",
            format="mxfp4-pack-quantized",
            config_groups={"group_0": {"targets": ["Linear"], "weights": MXFP4}},
            ignore=["lm_head"],
        ),
        all_linears(encoders.mxfp4),
        torch.bfloat16,
        {"tie_word_embeddings": False},
    ),
    "nvfp4 in float16": (
        section("modelopt", quant_algo="NVFP4", ignore=["lm_head"]),
        all_linears(encoders.nvfp4),
        torch.float16,
        {},
    ),
    "mlx with embeddings": (
        {"quantization": {"group_size": GROUP, "bits": 3}},
        lambda name, weight: encoders.mlx(weight, 3, GROUP, torch.bfloat16),
        torch.bfloat16,
        {"family": "Llama"},
    ),
}


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4 in float16"])
@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_small_floats_stay_codes_on_the_device(name: str, target: str, tmp_path: Path) -> None:
    """Those of MXFP4 became numbers of 16 bits when weights were loaded, with scales by a table of powers of two."""
    from npu_compiler.frontend.language_model import extract_language_model

    config, encode, kind, options = FORMATS[name]
    write_checkpoint(tmp_path / "source", config, encode, kind, num_hidden_layers=1, **options)
    spec = extract_language_model(tmp_path / "source", tmp_path / "model", cache_length=64, prefill=())
    program = npu_compiler.compile(tmp_path / "model" / spec.functions["decode"].ir, target=target)
    held = sum(recipe.spec.nbytes for recipe in program.recipes)
    assert held <= 1.02 * (tmp_path / "source" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_becomes_a_model(name: str, tmp_path: Path, device: Device) -> None:
    config, encode, kind, options = FORMATS[name]
    model = write_checkpoint(tmp_path / "source", config, encode, kind, num_hidden_layers=1, **options)
    check(tmp_path / "source", model, tmp_path / "model", device, (16,) if name == "awq" else ())
