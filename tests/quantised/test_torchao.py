"""torchao's safetensors: by their description, and as the library makes them where it is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.formats import importer_of
from npu_compiler.frontend.checkpoints.small_floats import E2M1
from npu_compiler.frontend.checkpoints.tensors import SafetensorsFolder
from npu_compiler.integers import ceil_div
from npu_runtime import Device
from tests.quantised.encoders import integers_of
from tests.quantised.test_decoders import all_linears, check
from tests.quantised.test_importers import Given, numbers, weight
from tests.support.quantised import Encoded, write_checkpoint

SECTION = {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}
GROUP = 32


def described(kind: str, **about: Any) -> str:
    return json.dumps({"_type": kind, "_data": about})


def imported(tensors: Mapping[str, torch.Tensor], text: str, shape: tuple[int, int]) -> CodedMatrix:
    given = Given({f"layer.{end}": tensor for end, tensor in tensors.items()})
    given.metadata = {"layer.weight": text}
    importer = importer_of(SECTION)
    assert importer is not None
    coded = importer.matrix("layer", shape, given)
    assert coded is not None
    assert not given.left()
    return coded.check("layer.weight")


def int4(dense: torch.Tensor) -> Encoded:
    """``Int4Tensor``: signed codes of four bits, ``code * scale + bias``."""
    codes, scales, zeros = integers_of(dense, 4, GROUP, torch.bfloat16)
    signed = torch.from_numpy(codes).int() - 8
    biases = (scales.float() * (8 - torch.from_numpy(zeros).float())).to(torch.bfloat16)
    wide = [part.double().repeat_interleave(GROUP, 1) for part in (scales, biases)]
    tensors = {
        "_weight_qdata": ((signed[:, ::2] & 15) | (signed[:, 1::2] << 4)).to(torch.int8),
        "_weight_scale": scales.t().contiguous(),
        "_weight_zero_point": biases.t().contiguous(),
    }
    return tensors, (signed.double() * wide[0] + wide[1]).to(torch.bfloat16).float()


INT4 = described("Int4Tensor", block_size=[1, GROUP])


def test_two_codes_to_a_byte() -> None:
    tensors, meant = int4(weight())
    assert torch.equal(numbers(imported(tensors, INT4, (48, 256)), torch.bfloat16).float(), meant)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_integers_of_few_bits_in_bytes_are_packed(bits: int) -> None:
    codes, scales, zeros = integers_of(weight(), bits, GROUP, torch.bfloat16)
    half = 1 << (bits - 1)
    signed, points = (torch.from_numpy(part).int() - half for part in (codes, zeros))
    meant = (signed - points.repeat_interleave(GROUP, 1)) * scales.double().repeat_interleave(GROUP, 1)
    tensors = {"_weight_qdata": signed.to(torch.int8), "_weight_scale": scales}
    tensors["_weight_zero_point"] = points.to(torch.int8)
    about = {"block_size": [1, GROUP], "target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"}}
    coded = imported(tensors, described("IntxUnpackedToInt8Tensor", **about), (48, 256))
    assert coded.codes.shape == (48, 256 * bits // 8)
    assert torch.equal(numbers(coded, torch.bfloat16), meant.to(torch.bfloat16))


@pytest.mark.parametrize("block", [[1, 256], [48, 256], [16, 128]])
def test_8_bit_floats_in_blocks(block: list[int]) -> None:
    codes = (weight() * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(48 // block[0], 256 // block[1]) + 0.5
    meant = codes.double() * scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    given = scales.reshape(()) if scales.numel() == 1 else scales
    text = described("Float8Tensor", block_size=block)
    coded = imported({"_weight_qdata": codes, "_weight_scale": given}, text, (48, 256))
    assert torch.equal(numbers(coded, torch.bfloat16), meant.to(torch.bfloat16))


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Scales as tensor cores take them: in tiles of 128 rows and 4 columns, scale by scale from the description."""
    rows, columns = scales.shape
    high, wide = ceil_div(rows, 128), ceil_div(columns, 4)
    made = torch.zeros(high * wide * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * wide + column // 4
            within = row % 128
            made[512 * tile + 16 * (within % 32) + 4 * (within // 32) + column % 4] = scales[row, column]
    return made.reshape(32 * high, 16 * wide)


def floats(element: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as they are stored, and their numbers [48, 256] in float64."""
    codes = torch.randint(0, 256, (48, 256), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    if element == "float4_e2m1fn_x2":
        codes = codes & 15
        made = torch.from_numpy(E2M1).double()[codes.int()]
        return codes[:, ::2] | codes[:, 1::2] << 4, made
    codes[(codes & 0x7C) == 0x7C] = 0  # neither NaN nor infinite
    stored = codes.view(getattr(torch, element))
    return stored, stored.double()


ELEMENTS = ["float4_e2m1fn_x2", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_tensors(element: str, tiles: bool) -> None:
    codes, made = floats(element)
    scales = torch.randint(100, 130, (48, 256 // GROUP), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    meant = made * torch.exp2(scales.double() - 127).repeat_interleave(GROUP, 1)
    stored = (in_tiles(scales) if tiles else scales).view(torch.float8_e8m0fnu)
    kind = {"_type": "torch.dtype", "_data": element}
    text = described("MXTensor", elem_dtype=kind, block_size=GROUP, is_swizzled_scales=tiles)
    coded = imported({"_weight_qdata": codes, "_weight_scale": stored}, text, (48, 256))
    assert torch.equal(numbers(coded, torch.bfloat16), meant.to(torch.bfloat16))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("whole", [None, 0.0137])
def test_nvfp4_tensors(whole: float | None, tiles: bool) -> None:
    codes, made = floats(ELEMENTS[0])
    scales = torch.randint(0, 127, (48, 16), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    factor = torch.tensor(1.0 if whole is None else whole)
    by_group = scales.view(torch.float8_e4m3fn).double() * factor.double()
    tensors = {"_weight_qdata": codes, "_weight_scale": in_tiles(scales) if tiles else scales}
    tensors["_weight_scale"] = tensors["_weight_scale"].view(torch.float8_e4m3fn)
    tensors |= {} if whole is None else {"_weight_per_tensor_scale": factor}
    text = described("NVFP4Tensor", block_size=16, is_swizzled_scales=tiles)
    given = numbers(imported(tensors, text, (48, 256)), torch.float32)
    torch.testing.assert_close(given.double(), made * by_group.repeat_interleave(16, 1), rtol=3e-7, atol=0)


def test_what_the_library_makes_of_small_floats() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    dense = weight(160, 320).to(torch.bfloat16)
    made = [
        mx.MXTensor.to_mx(dense, getattr(torch, element), GROUP, is_swizzled_scales=tiles)
        for element in ELEMENTS
        for tiles in (False, True)
    ]
    for tiles in (False, True):
        made.append(nv.NVFP4Tensor.to_nvfp4(dense, is_swizzled_scales=tiles))
        whole = dense.abs().max().float() / (448 * 6)
        made.append(nv.NVFP4Tensor.to_nvfp4(dense, per_tensor_scale=whole, is_swizzled_scales=tiles))
    for tensor in made:
        flat, metadata = support.flatten_tensor_state_dict({"0.weight": tensor})
        tensors = {name.removeprefix("0."): part for name, part in flat.items()}
        coded = imported(tensors, metadata["0.weight"], (160, 320))
        meant = tensor.dequantize(torch.float32) if hasattr(tensor, "dequantize") else tensor.to_dtype(torch.float32)
        assert torch.equal(numbers(coded, torch.float32), meant), metadata


def test_what_the_library_makes() -> None:
    library = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    few: list[Any] = [getattr(torch, name) for name in ("int4", "int3")]
    rows, groups = library.PerRow(), library.PerGroup(GROUP)
    configs = [library.Int8WeightOnlyConfig(version=2, granularity=kind) for kind in (rows, groups)]
    configs += [library.Int8WeightOnlyConfig(version=2, granularity=library.PerTensor())]
    configs += [library.Float8WeightOnlyConfig()]
    configs += [library.IntxWeightOnlyConfig(weight_dtype=kind, granularity=groups) for kind in few]
    for config in configs:
        module = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False)).to(torch.bfloat16)
        library.quantize_(module, config)
        weight_of: Any = module[0].weight
        meant = weight_of.dequantize()
        flat, metadata = support.flatten_tensor_state_dict(module.state_dict())
        tensors = {name.removeprefix("0."): tensor for name, tensor in flat.items()}
        coded = imported(tensors, metadata["0.weight"], (48, 256))
        assert torch.equal(numbers(coded, torch.bfloat16), meant), config


@pytest.mark.parametrize(
    ("tensors", "text", "message"),
    [
        ({}, described("Int4TilePackedTo4dTensor"), "given torchao's 'Int4TilePackedTo4dTensor', .* plain packing"),
        ({}, "{", r"'layer\.weight': given '{' in the header of its file, expected the class"),
        ({}, described("Int8Tensor", block_size=[1, 48]), "given groups of 48, expected a divisor of its 256 columns"),
        ({}, described("Int8Tensor", block_size=[1]), r"given block_size=\[1\], expected rows and columns"),
        ({"_weight_act_pre_scale": torch.ones(256)}, INT4, "given a scale for activations, expected weights alone"),
        (
            {},
            described("MXTensor", elem_dtype="float6_e2m3", block_size=32),
            "given elem_dtype='float6_e2m3', expected f",
        ),
        (
            {},
            described("NVFP4Tensor", block_size=[1, 16]),
            r"given block_size=\[1, 16\], expected the columns that share",
        ),
        ({}, described("NVFP4Tensor", block_size=48), "given groups of 48, expected a divisor of its 256 columns"),
        (
            {
                "_weight_qdata": torch.zeros(48, 128, dtype=torch.uint8),
                "_weight_scale": torch.ones(48, 16).to(torch.float8_e4m3fn),
            },
            described("NVFP4Tensor", block_size=16, is_swizzled_scales=True),
            "given 768 scales, expected 2048: 1 x 4 tiles of 128 x 4",
        ),
        (
            {
                "_weight_qdata": torch.zeros(48, 128, dtype=torch.uint8),
                "_weight_scale": torch.full((48, 8), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            },
            described("MXTensor", elem_dtype="float4_e2m1fn_x2", block_size=32),
            r"'layer\._weight_scale': given the scale NaN \(code 255 of float8_e8m0fnu\) at \[0, 0\]",
        ),
        (
            {
                "_weight_qdata": torch.full((48, 256), 9, dtype=torch.int8),
                "_weight_scale": torch.ones(48, 1),
                "_weight_zero_point": torch.zeros(48, 1, dtype=torch.int8),
            },
            described("IntxUnpackedToInt8Tensor", block_size=[1, 256], target_dtype="int4"),
            "given codes from 9 to 9, expected -8 to 7",
        ),
    ],
)
def test_what_is_not_read_says_so(tensors: dict[str, torch.Tensor], text: str, message: str) -> None:
    with pytest.raises(ExtractionError, match=message):
        imported(tensors, text, (48, 256))


def test_a_checkpoint_becomes_a_model(tmp_path: Path, device: Device) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    model = write_checkpoint(source, SECTION, all_linears(int4), torch.bfloat16, num_hidden_layers=1)
    file = source / "model.safetensors"
    tensors = load_file(file)
    ends = "._weight_qdata"
    coded = {f"{name.removesuffix(ends)}.weight" for name in tensors if name.endswith(ends)}
    metadata = dict.fromkeys(coded, INT4) | {"tensor_names": json.dumps(sorted(coded))}
    save_file(tensors, file, metadata)
    assert SafetensorsFolder(source).metadata == metadata
    check(source, model, tmp_path / "model", device)
