"""PyTorch's ops that make codes of numbers, and numbers of codes, on a device and in PyTorch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the ops of quantized_decomposed

import npu_compiler
import npu_compiler.frontend.coded_layers  # defines npu_codes::dequantize
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.integers import ceil_div
from npu_runtime import Device, load
from tests.support.extraction import Function
from tests.support.ir_builder import IRBuilder
from tests.support.running import run_ir

OPS = torch.ops.quantized_decomposed
LIMITS = (-128, 127, torch.int8)
RANDOM = torch.Generator().manual_seed(0)
NUMBERS = torch.randn(6, 32, generator=RANDOM) * 4
CODES = torch.randint(-128, 128, (6, 32), generator=RANDOM, dtype=torch.int8)
ROWS, GROUPS = (
    2.0 ** torch.randint(-6, 0, (6,), generator=RANDOM),
    2.0 ** torch.randint(-6, 0, (6, 4), generator=RANDOM),
)
ZEROS, GROUP_ZEROS = torch.arange(-3, 3), torch.arange(24).reshape(6, 4) - 12
ONE, ZERO = torch.tensor([0.0625]), torch.tensor([3])
LOW, HIGH = torch.tensor(-100), torch.tensor(101)

Spelling = tuple[torch.Tensor, Callable[[torch.Tensor], Any]]
SPELLINGS: dict[str, Spelling] = {
    "quantize_per_tensor": (NUMBERS, lambda x: OPS.quantize_per_tensor(x.float(), 0.0625, 3, *LIMITS)),
    "quantize_per_tensor.tensor": (NUMBERS, lambda x: OPS.quantize_per_tensor(x.float(), ONE, ZERO, *LIMITS)),
    "quantize_per_tensor.tensor2": (
        NUMBERS,
        lambda x: OPS.quantize_per_tensor.tensor2(x.float(), ONE, ZERO, LOW, HIGH, torch.int8),
    ),
    "quantize_per_channel": (NUMBERS, lambda x: OPS.quantize_per_channel(x.float(), ROWS, ZEROS, 0, *LIMITS)),
    "quantize_per_token": (NUMBERS, lambda x: OPS.quantize_per_token(x, ROWS[:, None], ZEROS[:, None], *LIMITS)),
    "quantize_per_channel_group": (
        NUMBERS,
        lambda x: OPS.quantize_per_channel_group(x, GROUPS, GROUP_ZEROS, *LIMITS, 8),
    ),
    "dequantize_per_tensor.tensor": (CODES, lambda x: OPS.dequantize_per_tensor(x, ONE, ZERO, *LIMITS)),
    "dequantize_per_tensor.tensor2": (
        CODES,
        lambda x: OPS.dequantize_per_tensor.tensor2(x, ONE, ZERO, LOW, HIGH, torch.int8),
    ),
    "dequantize_per_token": (
        CODES,
        lambda x: OPS.dequantize_per_token(x, ROWS[:, None], ZEROS[:, None], *LIMITS, torch.float32),
    ),
    "dequantize_per_channel_group": (
        CODES,
        lambda x: OPS.dequantize_per_channel_group(x, GROUPS, GROUP_ZEROS, *LIMITS, 8, torch.float32),
    ),
    "dequantize_per_channel_group, symmetric": (
        CODES,
        lambda x: OPS.dequantize_per_channel_group(x, GROUPS, None, *LIMITS, 8, torch.float32),
    ),
}


def check(given: torch.Tensor, function: Callable[[torch.Tensor], Any], device: Device) -> None:
    extraction = npu_compiler.extract(Function(function), (given,))
    program = npu_compiler.compile(extraction, target=device.target)
    result = torch.as_tensor(load(program, extraction.weights, device)(given))
    torch.testing.assert_close(result.double(), function(given).double(), rtol=2**-11, atol=0)


@pytest.mark.parametrize("name", SPELLINGS)
def test_equals_torch(name: str, device: Device) -> None:
    given, function = SPELLINGS[name]
    given = given.half().float() if given.dtype.is_floating_point else given
    check(given, function, device)


@pytest.mark.parametrize("zeros", [GROUP_ZEROS, None], ids=["zeros", "symmetric"])
def test_affine_blocks_equal_torchao(zeros: torch.Tensor | None, device: Device) -> None:
    pytest.importorskip("torchao.quantization")
    made = torch.ops.torchao
    points = torch.zeros_like(GROUP_ZEROS) if zeros is None else zeros
    for given, function in (
        (CODES, lambda x: made.dequantize_affine(x, [1, 8], GROUPS, zeros, torch.int8, -128, 127)),
        (NUMBERS, lambda x: made.quantize_affine(x, [1, 8], GROUPS, points, torch.int8, -128, 127)),
        (NUMBERS, lambda x: made.quantize_affine(x, [1, 8], GROUPS, points, torch.uint8)),
    ):
        given = given.half().float() if given.dtype.is_floating_point else given
        check(given, function, device)


PACKED: list[dict[str, Any]] = [
    {"bits": bits, "columns": 30, "group": group} for bits, group in ((2, 5), (3, 30), (4, 8), (5, 7), (6, 4), (7, 30))
]


@pytest.mark.parametrize("shapes", PACKED, ids=str)
@pytest.mark.parametrize("zeros", [True, False])
def test_streams_of_bits_are_read(shapes: dict[str, Any], zeros: bool, device: Device) -> None:
    bits, columns, group = shapes.values()
    groups = ceil_div(columns, group)
    random = torch.Generator().manual_seed(bits)
    tensors = {
        "codes": torch.randint(0, 256, (9, ceil_div(columns * bits, 8)), generator=random, dtype=torch.uint8),
        "scales": torch.rand((5, groups), generator=random).half(),
    }
    others = torch.randn(1 << bits if zeros else (5, groups), generator=random)
    tensors["codebook" if zeros else "biases"] = others.half().float()
    if zeros:
        tensors["zeros"] = torch.randint(0, 256, (5, ceil_div(groups * bits, 8)), generator=random, dtype=torch.uint8)
    builder = IRBuilder()
    values = {name: builder.input(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    parts = [values.get(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
    options = (bits, columns, group, 2, 0, torch.float16)
    ir = builder.build(builder.call("npu_codes.dequantize.default", *parts, *options))
    (result,) = run_ir(ir, tensors, device, "float16")
    exact: list[Any] = [tensors.get(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
    exact[1] = tensors["scales"].double()
    expected = torch.ops.npu_codes.dequantize(*exact, *options[:-1], torch.float64)
    np.testing.assert_allclose(result.astype(np.float64), expected.numpy(), rtol=2**-11, atol=2**-20)


def test_codes_that_do_not_fit_their_scales_are_refused(device: Device) -> None:
    builder = IRBuilder()
    codes, scales = builder.input("codes", (4, 16), torch.uint8), builder.input("scales", (4, 3), torch.float16)
    options = (4, 32, 8, 1, 0, torch.float16)
    ir = builder.build(builder.call("npu_codes.dequantize.default", codes, scales, None, None, None, *options))
    with pytest.raises(
        UnsupportedOpError, match=r"given codes \[4, 16\] and scales \[4, 3\], expected rows of 16 bytes"
    ):
        npu_compiler.compile(ir, target=device.target)


@pytest.mark.parametrize("target", ["metal", "cuda"])
@pytest.mark.parametrize(
    ("bits", "kind", "groups"),
    [(8, torch.int8, 1), (8, torch.float8_e4m3fn, 1), (8, torch.int8, 4), (4, torch.uint8, 1), (3, torch.uint8, 4)],
)
def test_products_load_codes_or_store_numbers_first(bits: int, kind: torch.dtype, groups: int, target: str) -> None:
    builder = IRBuilder()
    codes = builder.weight("codes", (48, 8 * bits), kind)
    scales, x = builder.weight("scales", (48, groups), torch.float16), builder.input("x", (1, 64), torch.float16)
    options = (bits, 64, 64 // groups, 1, 0, torch.float16)
    weight = builder.call("npu_codes.dequantize.default", codes, scales, None, None, None, *options)
    ir = builder.build(builder.call("aten.linear.default", x, weight))
    plan = npu_compiler.compile(ir, target=target).main
    assert [("stored as numbers before they are read" in note) for note in plan.notes] == [True] * (len(plan.steps) - 1)
    assert len(plan.steps) == (2 if bits == 3 and target == "metal" else 1)


class QuantisedImage(torch.nn.Module):
    """Two convolutions and a linear as PT2E leaves them, with codes of weights and of what goes between."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        for name, shape in (("first", (8, 3, 3, 3)), ("second", (8, 8, 3, 3)), ("last", (5, 8))):
            codes = torch.randint(-127, 128, shape, generator=random, dtype=torch.int8)
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scales", 2.0 ** torch.randint(-10, -8, shape[:1], generator=random))
            self.register_buffer(f"{name}_zeros", torch.zeros(shape[0], dtype=torch.int64))

    def weight(self, name: str) -> torch.Tensor:
        scales, zeros = getattr(self, f"{name}_scales"), getattr(self, f"{name}_zeros")
        made: torch.Tensor = OPS.dequantize_per_channel(getattr(self, name), scales, zeros, 0, -127, 127, torch.int8)
        return made

    @staticmethod
    def coded(x: torch.Tensor) -> torch.Tensor:
        codes = OPS.quantize_per_tensor(x, 0.03125, -4, *LIMITS)
        made: torch.Tensor = OPS.dequantize_per_tensor(codes, 0.03125, -4, *LIMITS)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.coded(torch.relu(torch.nn.functional.conv2d(self.coded(x), self.weight("first"), padding=1)))
        x = self.coded(torch.relu(torch.nn.functional.conv2d(x, self.weight("second"), padding=1)))
        return torch.nn.functional.linear(self.coded(x.mean((2, 3))), self.weight("last"))


def test_a_graph_of_pt2e_compiles_as_it_is(device: Device) -> None:
    model = QuantisedImage().eval()
    given = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(2)).half().float()
    extraction = npu_compiler.extract(model, (given,))
    program = npu_compiler.compile(extraction, target=device.target)
    result = torch.as_tensor(load(program, extraction.weights, device)(given)).float()
    expected = model(given)
    # a sum in another order may round to the next code
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def fragments(codes: torch.Tensor, tiles: int) -> torch.Tensor:
    """Codes [n, k] as operands of tensor cores' instructions lie in the registers of 32 lanes, by their description.

    A lane holds of a tile of 8 rows by 16 columns those of row ``lane / 4`` and columns ``lane % 4 * 2`` + 0, 1, 8, 9;
    two tiles side by side are a word, whose codes from the lowest on are every second of these eight, then the others.
    """
    n, k = codes.shape
    made = torch.zeros(n // 8, k // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for eight, outer, lane, pair in np.ndindex(*made.shape):
        first = (outer * tiles + 2 * pair) * 16 + lane % 4 * 2
        own = [int(codes[8 * eight + lane // 4, first + at]) for at in (0, 1, 8, 9, 16, 17, 24, 25)]
        made[eight, outer, lane, pair] = sum(code << 4 * at for at, code in enumerate(own[::2] + own[1::2]))
    return made.to(torch.int32)


@pytest.mark.parametrize("tiles", [2, 8])
def test_codes_in_fragments_of_tensor_cores(tiles: int, device: Device) -> None:
    codes = torch.randint(0, 16, (24, 256), generator=RANDOM)
    scales_and_zeros = torch.randn(8, 24, 2, generator=RANDOM).half()

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", fragments(codes, tiles))
            self.register_buffer("scales_and_zeros", scales_and_zeros)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, self.codes, 32, self.scales_and_zeros)
            return made

    x = torch.randn(3, 256, generator=RANDOM).half()
    extraction = npu_compiler.extract(Packed().eval(), (x,))
    result = torch.as_tensor(
        load(npu_compiler.compile(extraction, target=device.target), extraction.weights, device)(x)
    )
    scale, zero = scales_and_zeros.double().permute(2, 1, 0).repeat_interleave(32, 2)
    weight = ((codes - 8) * scale + zero).half().double()
    wanted = x.double() @ weight.T
    torch.testing.assert_close(result.double(), wanted, rtol=2**-10, atol=2**-10 * float(wanted.abs().max()))
