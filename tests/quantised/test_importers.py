"""Each importer's weights against what the producer makes of the same tensors, or against its format's description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.formats import importer_of
from npu_compiler.frontend.checkpoints.packing import pack, unpack
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.frontend.coded_layers import CodedLinear, CodedWeight
from tests.quantised import encoders
from tests.support.decoders import import_transformers
from tests.support.quantised import Array, Encoded, as_array, bit_stream

HALVES = [torch.float16, torch.bfloat16]
SHAPE = (48, 256)


class Given(Tensors):
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = {name: as_array(tensor) for name, tensor in tensors.items()}

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def _read(self, name: str) -> Array:
        return self.tensors[name]


def weight(rows: int = SHAPE[0], columns: int = SHAPE[1]) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) / 16


def imported(section: Mapping[str, Any], encoded: Mapping[str, torch.Tensor], shape: Any = SHAPE) -> CodedMatrix:
    importer = importer_of(section)
    assert importer is not None
    tensors = Given({f"layer.{end}": tensor for end, tensor in encoded.items()})
    coded = importer.matrix("layer", tuple(shape), tensors)
    assert coded is not None
    assert not tensors.left()
    return coded.check("layer.weight")


def numbers(coded: CodedMatrix, kind: torch.dtype) -> torch.Tensor:
    """The matrix in the order of its inputs."""
    made: torch.Tensor = CodedWeight(coded, kind)()
    if coded.permutation is not None:
        made = made[:, torch.from_numpy(np.argsort(coded.permutation))]
    return made


def check(section: Mapping[str, Any], encoded: Encoded, kind: torch.dtype, most: float = 1.02) -> CodedMatrix:
    """Compares numbers to the last bit of `kind`, and bytes with the tensors'."""
    tensors, meant = encoded
    coded = imported(section, tensors, meant.shape)
    assert torch.equal(numbers(coded, kind), meant.to(kind))
    held = sum(buffer.nbytes for buffer in CodedWeight(coded, kind).buffers())
    assert held <= most * sum(tensor.nbytes for tensor in tensors.values())
    return coded


@pytest.mark.parametrize("bits", range(2, 9))
def test_streams_of_bits(bits: int) -> None:
    given = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96), np.uint8)
    stream = pack(given, bits)
    assert np.array_equal(stream, bit_stream(given, bits).view(np.uint8))
    assert np.array_equal(unpack(stream, bits, 96), given)
    assert np.array_equal(unpack(pack(given[:, :13], bits), bits, 13), given[:, :13])


def gptq(**options: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False} | options}


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("first", [True, False])
def test_gptq(bits: int, first: bool, kind: torch.dtype) -> None:
    section = gptq(bits=bits, checkpoint_format="gptq" if first else "gptq_v2")
    check(section, encoders.gptq(weight(64), bits, 64, kind, first), kind)


def test_gptq_with_an_order_of_inputs_and_a_module_of_its_own() -> None:
    order = np.random.default_rng(0).permutation(256)
    encoded = encoders.gptq(weight(64), 8, 32, torch.float16, order=order)
    section = gptq(desc_act=True, dynamic={"-:other": {}, "+:lay.*": {"bits": 8, "group_size": 32}})
    coded = check(section, encoded, torch.float16, 1.1)  # int64 places of inputs
    assert coded.permutation is not None


def test_gptq_with_one_zero_point_holds_none() -> None:
    tensors, _ = encoders.gptq(weight(64), 4, 64, torch.float16)
    words = torch.full_like(tensors["qzeros"], 0x77777777)
    coded = imported(gptq(sym=True), dict(tensors) | {"qzeros": words}, (64, 256))
    assert coded.zeros is None
    assert coded.zero == 8


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_awq(version: str) -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": version, "zero_point": True}
    check({"quantization_config": section}, encoders.awq(weight(), 64, torch.float16, version), torch.float16)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(bits: int) -> None:
    section = {"quantization": {"group_size": 64, "bits": 4, "layer": {"group_size": 32, "bits": bits}}}
    check(section, encoders.mlx(weight(), bits, 32, torch.bfloat16), torch.bfloat16)


def test_fp8_in_blocks() -> None:
    section = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    check(section, encoders.block_fp8(weight(300, 320), (128, 128), torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("size", [1, 48])
def test_fp8_with_a_scale_for_all_or_for_each_row(size: int) -> None:
    codes, scales = (weight() * 100).to(torch.float8_e4m3fn), torch.rand(size) + 0.5
    meant = codes.float() * scales.reshape(-1, 1)
    section = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    given = {"weight": codes, "weight_scale": scales.reshape(()) if size == 1 else scales, "input_scale": torch.ones(1)}
    check(section, (given, meant), torch.bfloat16)


def compressed(weights: Mapping[str, Any], format_: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    section = {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}}
    return {"quantization_config": section}


def produced(compressor: str, weights: Mapping[str, Any], zeros: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors and numbers as the library makes them of a weight."""
    import_transformers()
    library = pytest.importorskip("compressed_tensors")
    args = library.quantization.QuantizationArgs(**weights)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args, format=compressor)
    dense, points = weight(64).to(torch.bfloat16), None
    group = weights.get("group_size") or dense.shape[1]
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        blocks = dense.float().reshape(64 // rows, rows, dense.shape[1] // columns, columns)
        scale = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
    else:
        groups = dense.float().reshape(64, -1, group)
        top = 448 if weights["type"] == "float" else (1 << (weights["num_bits"] - 1)) - 1
        scale = (groups.abs().amax(-1) / top).to(torch.bfloat16)
        if zeros:
            points = torch.randint(-3, 4, scale.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    state = {"weight": dense, "weight_scale": scale} | ({} if points is None else {"weight_zero_point": points})
    made = library.compressors.BaseCompressor.load_from_registry(compressor)
    packed = made.compress(dict(state), scheme)
    meant = made.decompress(dict(packed), scheme)["weight"]
    return packed, meant


@pytest.mark.parametrize(
    ("format_", "weights", "zeros"),
    [
        *(("pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": 32}, False) for bits in (3, 4, 8)),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, False),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, True),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}, False),
        ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, True),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, False),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}, False),
        ("naive-quantized", {"num_bits": 8, "strategy": "channel"}, False),
    ],
)
def test_compressed_tensors_as_its_library_has_them(format_: str, weights: dict[str, Any], zeros: bool) -> None:
    weights = {"type": "int", "symmetric": True} | weights
    tensors, meant = produced(format_, weights, zeros)
    coded = imported(compressed(weights, format_), tensors, meant.shape)
    assert torch.equal(numbers(coded, torch.bfloat16), meant.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("twice", [False, True])
def test_bitsandbytes_as_its_library_has_them(kind: str, twice: bool) -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    dense = weight().to(torch.bfloat16)
    packed, state = library.quantize_4bit(dense, blocksize=64, compress_statistics=twice, quant_type=kind)
    meant = library.dequantize_4bit(packed, state)
    parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    section = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    coded = imported(section, {"weight": packed} | parts)
    given = numbers(coded, torch.float32)
    torch.testing.assert_close(given, library.dequantize_4bit(packed, _exact(state)), rtol=1e-6, atol=1e-9)
    assert (numbers(coded, torch.bfloat16) == meant).float().mean() > 0.999


def _exact(state: Any) -> Any:
    state.dtype = torch.float32
    return state


def test_bitsandbytes_in_blocks_across_rows() -> None:
    codes, largest, book = torch.randint(0, 16, (48 * 160,)), torch.rand(120) + 0.1, torch.randn(16).sort().values
    state = torch.tensor(list(json.dumps({"blocksize": 64, "shape": [48, 160]}).encode()), dtype=torch.uint8)
    given = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.absmax": largest}
    given |= {"weight.quant_map": book, "weight.quant_state.bitsandbytes__nf4": state}
    section = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    meant = (book[codes].double() * largest.double().repeat_interleave(64)).reshape(48, 160)
    assert torch.equal(numbers(imported(section, given, (48, 160)), torch.bfloat16), meant.to(torch.bfloat16))


def test_bitsandbytes_in_bytes() -> None:
    codes = torch.randint(-127, 128, SHAPE, dtype=torch.int8)
    largest = torch.rand(SHAPE[0])
    section = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    coded = imported(section, {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)})
    torch.testing.assert_close(numbers(coded, torch.float32), codes * largest[:, None] / 127, rtol=1e-6, atol=0)


def test_what_is_quantised_twice_is_not_larger() -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    packed, state = library.quantize_4bit(
        weight(256, 1024).to(torch.bfloat16), compress_statistics=True, quant_type="nf4"
    )
    parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    section = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    coded = imported(section, {"weight": packed} | parts, (256, 1024))
    layer = CodedLinear(CodedWeight(coded, torch.bfloat16), bias=torch.ones(256, dtype=torch.bfloat16))
    held = sum(buffer.nbytes for buffer in layer.buffers())
    assert held <= 1.02 * sum(tensor.nbytes for tensor in (packed, *parts.values()))
    for target in ("metal", "cuda"):  # where it became numbers of 16 bits when weights were loaded
        program = npu_compiler.compile(
            npu_compiler.extract(layer.eval(), torch.zeros(1, 1024).bfloat16()), target=target
        )
        assert sum(recipe.spec.nbytes for recipe in program.recipes) == held


def test_a_plain_model_has_no_importer() -> None:
    assert importer_of(json.loads('{"model_type": "qwen2"}')) is None
