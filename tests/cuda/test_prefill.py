"""Attention of many rows on a CUDA device, against PyTorch in float64: every way to divide it, every kind of mask."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import KernelCall, options_of
from npu_runtime import Device
from tests.cuda.test_attention import BOTH, NAME, added, grouped, up_to
from tests.ops import test_ops
from tests.ops.cases import BOOL, Case, Operand, case, floats


def many(heads: int, groups: int, rows: int, length: int, size: int, *mask: Operand, **options: object) -> Case:
    """Enough heads to fill a device with tiles of 128 rows."""
    q, keys = floats(2, heads, rows, size), [floats(2, groups, length, size) for _ in range(2)]
    return case(NAME, q, *keys, *mask, enable_gqa=True, **options).storing(2)


def closed_rows(rows: int, length: int) -> Operand:
    """Every third row is closed everywhere, and so are all from 100 on."""
    data = tuple(float(i % 3 != 0 and i < 100 and (i + j) % 5 != 0) for i in range(rows) for j in range(length))
    return Operand((1, 1, rows, length), BOOL, data=data)


CASES = [
    *(grouped(150, 333, size, up_to(150, 333, 100)) for size in (16, 32, 48, 64, 80, 96, 128)),
    grouped(300, 700, 64, added(300, 700, 300, float("-inf"))),
    grouped(129, 257, 128, added(129, 257, 128, -3.0)),
    grouped(70, 5000, 128, up_to(70, 5000, 4900)),
    grouped(70, 5000, 64, up_to(70, 5000, 60)),
    grouped(130, 200, 128, closed_rows(130, 200)),
    grouped(200, 90, 128, is_causal=True),
    grouped(65, 640, 128, floats(1, 12, 65, 640)),
    grouped(40, 100, 128, Operand((1, 12, 40, 100), BOOL, -1, 1)),
    case(NAME, floats(2, 3, 77, 128), floats(2, 3, 66, 128), floats(2, 3, 66, 64), scale=0.3).storing(2),
    many(70, 70, 130, 300, 64, is_causal=True),
    many(70, 70, 70, 300, 128),
    many(96, 8, 100, 150, 128, Operand((2, 1, 100, 150), BOOL, -1, 1)),
    many(96, 8, 100, 150, 96, floats(1, 96, 100, 150)),
    many(96, 32, 100, 300, 80, up_to(100, 300, 190)),
    case(NAME, *[floats(3, 4, 6, 144, 32)] * 3, floats(4, 6, 144, 144)).storing(2),
    case(NAME, *[floats(3, 4, 2, 144, 32)] * 3, Operand((4, 1, 144, 144), BOOL, -1, 1)).storing(2),
]


def lowered(case: Case) -> list[str]:
    """The kernels of the ways to compute a case, the preferred first."""
    main = npu_compiler.compile(case.ir(torch.float32), "cuda").main
    calls = [option.calls[-1] for option in options_of(main.steps[-1])]
    return [main.kernels[call.kernel].entry for call in calls if isinstance(call, KernelCall)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_warpgroups_are_preferred_and_any_device_has_a_way(case: Case) -> None:
    assert lowered(case) == ["attention_prefill", "attention"]


@pytest.mark.parametrize(
    "case",
    [
        grouped(10, 300, 128, is_causal=True),
        grouped(100, 300, 136, is_causal=True),
        grouped(100, 300, 72, is_causal=True),
        grouped(100, 300, 64, scale=-0.5),
        case(
            NAME,
            floats(1, 12, 100, 128),
            *[floats(1, 2, 128, 300).through("aten.permute.default", (0, 1, 3, 2))] * 2,
            enable_gqa=True,
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_warpgroups_takes_the_other_way(case: Case) -> None:
    assert lowered(case) == ["attention"]


@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(case: Case, compute: torch.dtype, device: Device) -> None:
    test_ops.check(case, torch.float32, compute, device)
