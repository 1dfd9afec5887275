"""Floats of four bits and scales of a byte: compressed-tensors' and MLX's, against library and description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.small_floats import E2M1
from tests.quantised.encoders import words
from tests.quantised.test_importers import SHAPE, compressed, imported, numbers, weight
from tests.support.decoders import import_transformers
from tests.support.quantised import bit_stream

FORMATS: dict[str, dict[str, Any]] = {
    "nvfp4-pack-quantized": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "mxfp4-pack-quantized": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "mxfp8-quantized": {"num_bits": 8, "strategy": "group", "group_size": 32},
}


@pytest.mark.parametrize("format_", FORMATS)
def test_compressed_tensors_as_its_library_has_them(format_: str) -> None:
    import_transformers()
    library = pytest.importorskip("compressed_tensors")
    weights: dict[str, Any] = {"type": "float", "symmetric": True} | FORMATS[format_]
    args = library.quantization.QuantizationArgs(**weights)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args, format=format_)
    dense = weight(64).to(torch.bfloat16)
    largest = dense.float().reshape(64, -1, weights["group_size"]).abs().amax(-1)
    state = {"weight": dense}
    if format_.startswith("nvfp4"):
        whole = 448 * 6 / dense.float().abs().max().reshape(1)
        state |= {"weight_scale": largest / 6 * whole, "weight_global_scale": whole}
    else:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest / (4 if "4" in format_ else 256))))
    made = library.compressors.BaseCompressor.load_from_registry(format_)
    packed = made.compress(dict(state), scheme)
    meant = made.decompress(dict(packed), scheme)["weight"]
    assert packed["weight_scale"].element_size() == 1
    coded = imported(compressed(weights, format_), packed, dense.shape)
    given = numbers(coded, torch.float32)
    assert float((given - dense.float()).norm() / dense.float().norm()) < (0.15 if coded.bits == 4 else 0.04)
    torch.testing.assert_close(given.to(meant.dtype), meant, rtol=2 * torch.finfo(meant.dtype).eps, atol=0)
    assert (given.to(meant.dtype) == meant).float().mean() > (0.999 if "mx" in format_ else 0.9)


def mx(mode: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """MLX's configuration, tensors, and the numbers that they mean, by the formats' descriptions."""
    generator = np.random.default_rng(0)
    bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = generator.integers(0, 1 << bits, SHAPE, np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN of 8-bit floats
    scales = generator.integers(110, 126 if mode != "nvfp4" else 120, (SHAPE[0], SHAPE[1] // group), np.uint8)
    as_floats = torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()
    wide = as_floats if mode == "nvfp4" else np.exp2(scales.astype(np.float64) - 127)
    made = E2M1[codes % 16] if bits == 4 else torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    meant = torch.from_numpy(made.astype(np.float64) * np.repeat(wide, group, 1))
    section = {"quantization": {"group_size": group, "bits": bits, "mode": mode}}
    return section, {"weight": words(codes, bits).view(torch.uint32), "scales": torch.from_numpy(scales)}, meant


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_mlx(mode: str) -> None:
    section, tensors, meant = mx(mode)
    assert torch.equal(numbers(imported(section, tensors), torch.bfloat16), meant.to(torch.bfloat16))


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}}


def test_modelopt_in_four_bits() -> None:
    _, tensors, meant = mx("nvfp4")
    given = {
        "weight": tensors["weight"].view(torch.uint8),
        "weight_scale": tensors["scales"].view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.25),
        "input_scale": torch.tensor(3.0),
    }
    coded = imported(modelopt("NVFP4"), given)
    assert torch.equal(numbers(coded, torch.bfloat16), (meant / 4).to(torch.bfloat16))
    with pytest.raises(ExtractionError, match=r"'layer\.weight_scale_2' is missing"):
        imported(modelopt("NVFP4"), {name: given[name] for name in ("weight", "weight_scale")})
    with pytest.raises(ExtractionError, match=r"weight_scale': given the shape \[48, 8\], expected \[48, 16\]"):
        imported(modelopt("NVFP4"), given | {"weight_scale": given["weight_scale"][:, :8]})
    with pytest.raises(ExtractionError, match="pre_quant_scale': given a scale for activations"):
        imported(modelopt("NVFP4"), given | {"pre_quant_scale": torch.ones(256)})


@pytest.mark.parametrize("scales", ["one", "rows", "powers"])
def test_modelopt_in_eight_bits(scales: str) -> None:
    _, tensors, meant = mx("mxfp8")
    codes = tensors["weight"].view(torch.float8_e4m3fn)
    factor = {"one": torch.tensor(0.02), "rows": torch.linspace(0.1, 1, 48)}.get(scales)
    given = {"weight": codes, "weight_scale": tensors["scales"] if factor is None else factor}
    if factor is not None:
        meant = codes.double() * factor.double().reshape(-1, 1)
    coded = imported(modelopt("MXFP8" if scales == "powers" else "FP8"), given)
    assert torch.equal(numbers(coded, torch.bfloat16), meant.to(torch.bfloat16))


def test_modelopt_of_other_algorithms_is_refused() -> None:
    with pytest.raises(ExtractionError, match="given quant_algo='W4A8_AWQ' in the quantisation's configuration"):
        imported(modelopt("W4A8_AWQ"), {})


def test_four_bits_are_the_numbers_of_e2m1() -> None:
    exponent, fraction = np.arange(8) >> 1, np.arange(8) & 1
    made = np.where(exponent > 0, (1 + fraction / 2) * np.exp2(exponent - 1.0), fraction / 2)
    assert np.array_equal(E2M1, [*made, *-made])
    assert bit_stream(np.arange(16, dtype=np.uint8)[None], 4).view(np.uint8)[0, 0] == 0x10  # the first in the low bits


def test_scales_that_are_no_numbers_are_refused() -> None:
    section, tensors, _ = mx("mxfp4")
    tensors["scales"][3, 1] = 255
    with pytest.raises(ExtractionError, match=r"the scale NaN \(code 255 of float8_e8m0fnu\) at \[3, 1\]"):
        imported(section, tensors)
    section, tensors, _ = mx("nvfp4")
    tensors["scales"][0, 2] = 0x7F
    with pytest.raises(ExtractionError, match=r"the scale NaN \(code 127 of float8_e4m3fn\) at \[0, 2\]"):
        imported(section, tensors)
    weights: dict[str, Any] = {"type": "float", "symmetric": True} | FORMATS["nvfp4-pack-quantized"]
    given = {
        "weight_packed": torch.zeros(48, 128, dtype=torch.uint8),
        "weight_scale": torch.ones(48, 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.zeros(1),
    }
    with pytest.raises(ExtractionError, match=r"weight_global_scale': given \[0\.0\], expected one number above 0"):
        imported(compressed(weights, "nvfp4-pack-quantized"), given)
    with pytest.raises(ExtractionError, match="given 4 bits in groups of 64 for 'mxfp4', expected 4 and 32"):
        imported({"quantization": {"group_size": 64, "bits": 4, "mode": "mxfp4"}}, mx("mxfp4")[1])
