"""Attention of the sizes that language models have, on a CUDA device, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
from npu_runtime import Device
from tests.ops import test_ops
from tests.ops.cases import BOOL, Case, Operand, case, floats

NAME = "scaled_dot_product_attention.default"
BOTH = pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def up_to(rows: int, length: int, first: int) -> Operand:
    """A mask of booleans: row i is open up to position `first` + i."""
    data = tuple(float(j <= first + i) for i in range(rows) for j in range(length))
    return Operand((1, 1, rows, length), BOOL, data=data)


def added(rows: int, length: int, first: int, low: float) -> Operand:
    """The same as numbers to add."""
    data = tuple(0.0 if j <= first + i else low for i in range(rows) for j in range(length))
    return Operand((1, 1, rows, length), data=data)


def heads(count: int, rows: int, size: int) -> Operand:
    """[1, count, rows, size], the heads side by side in memory as a projection leaves them."""
    return floats(1, rows, count, size).through("aten.permute.default", (0, 2, 1, 3))


def grouped(rows: int, length: int, size: int, mask: Operand | None = None, **options: object) -> Case:
    """Six query heads for each of two heads of keys."""
    keys = floats(1, 2, length, size), floats(1, 2, length, size)
    return case(NAME, heads(12, rows, size), *keys, mask, 0.0, enable_gqa=True, **options).storing(2)


CASES = [
    grouped(1, 2048, 128, up_to(1, 2048, 300)),
    grouped(1, 2048, 128, up_to(1, 2048, 0)),
    grouped(1, 2047, 128, up_to(1, 2047, 2046)),
    grouped(1, 9000, 128, up_to(1, 9000, 8500)),
    grouped(1, 2048, 128, added(1, 2048, 700, float("-inf"))),
    grouped(3, 600, 64, up_to(3, 600, 400)),
    grouped(8, 600, 80, up_to(8, 600, 77)),
    grouped(130, 200, 128, up_to(130, 200, 40)),
    grouped(130, 130, 64, is_causal=True),
    grouped(256, 256, 128, up_to(256, 256, 0)),
    case(NAME, heads(2, 70, 256), heads(2, 90, 256), heads(2, 90, 256)).storing(2),
    case(NAME, heads(2, 33, 40), heads(2, 90, 40), heads(2, 90, 24), floats(1, 2, 33, 90)).storing(2),
    case(NAME, *[floats(3, 4, 6, 49, 32)] * 3, floats(4, 6, 49, 49)).storing(2),
    case(NAME, *[floats(3, 4, 6, 49, 32)] * 3, added(49, 49, 20, float("-inf"))).storing(2),
    case(NAME, floats(3, 4, 2, 1, 64), *[floats(3, 4, 2, 700, 64)] * 2, floats(1, 4, 2, 1, 700)).storing(2),
    case(NAME, floats(3, 4, 1, 64), *[floats(3, 4, 40, 64)] * 2, floats(3, 1, 1, 40)).storing(2),
    case(NAME, floats(3, 4, 130, 64), *[floats(3, 4, 50, 64)] * 2, floats(1, 1, 130, 50)).storing(2),
    case(NAME, floats(2, 4, 5, 64), *[floats(2, 4, 33, 64)] * 2, up_to(5, 33, 20)).storing(2),
    case(NAME, heads(3, 5, 17), heads(3, 90, 17), heads(3, 90, 17), scale=0.3).storing(2),
]


def test_one_block_of_positions_needs_no_launch_that_looks_at_the_mask() -> None:
    def entries(rows: int, length: int) -> set[str]:
        ir = case(NAME, heads(2, rows, 64), *[heads(2, length, 64)] * 2, floats(1, 1, rows, length)).ir(torch.float32)
        return {kernel.entry for kernel in npu_compiler.compile(ir, "cuda").main.kernels}

    assert "mask_states" not in entries(49, 49)
    assert "mask_states" in entries(65, 65)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(case: Case, compute: torch.dtype, device: Device) -> None:
    test_ops.check(case, torch.float32, compute, device)
