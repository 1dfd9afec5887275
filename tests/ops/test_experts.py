"""Products of groups of rows, as mixtures of experts have them, exported and compared with PyTorch in float64."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import npu_compiler
import npu_runtime
from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError
from npu_compiler.frontend.extraction import Extraction
from tests.cuda.kernels import check_plan_compiles
from tests.ops.cases import case, floats
from tests.support.running import run_ir

Sizes = tuple[int, int, int, int]  # rows, groups, k, columns


class Grouped(nn.Module):
    """The product; with `turned` of matrices that lie as those of linears do."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned

    def forward(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, weight.transpose(1, 2) if self.turned else weight, ends).relu()


def extracted(sizes: Sizes, turned: bool) -> Extraction:
    rows, groups, k, columns = sizes
    shape = (groups, columns, k) if turned else (groups, k, columns)
    given = torch.zeros(rows, k, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    return npu_compiler.extract(Grouped(turned).eval(), (*given, torch.zeros(groups, dtype=torch.int32)))


def grouped_rows(size: int) -> list[dict[str, Any]]:
    """The IR of a product of groups of rows of a size, whose matrices lie either way.

    PyTorch takes sizes of whole chunks of 16 bytes alone; any others are written into the IR.
    """
    texts = [json.dumps(extracted((13, 4, 32, 32), turned).ir) for turned in (False, True)]
    return [json.loads(re.sub(r"\b32\b", str(size), text)) for text in texts]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ends", [(2, 2, 9, 11), (0, 0, 0, 11), (11, 11, 11, 11), (3, 5, 6, 7), (12, -4, 99, 5)])
def test_rows_of_each_group_meet_their_matrix(turned: bool, ends: tuple[int, ...]) -> None:
    """Rows behind the last group give zeros; ends that do not ascend give other numbers, and reach no other memory."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((11, 24), (4, 24, 40)))
    program = npu_compiler.compile(extracted((11, 4, 24, 40), turned).ir, "metal")
    given = weight.transpose(1, 2).contiguous() if turned else weight
    found = npu_runtime.load(program, device="software-metal")(x, given, torch.tensor(ends, dtype=torch.int32))
    if list(ends) != sorted(ends) or ends[-1] > 11:
        return
    starts = (0, *ends[:-1])
    groups = [x[a:b].double() @ w.double() for a, b, w in zip(starts, ends, weight, strict=True)]
    expected = torch.cat([*groups, torch.zeros(11 - ends[-1], 40)]).relu()
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize(("turned", "architecture"), [(False, 70), (True, 80), (True, 90)])
@pytest.mark.parametrize("sizes", [(64, 8, 256, 512), (2, 32, 128, 96)])
def test_kernels_for_cuda_compile(sizes: Sizes, turned: bool, architecture: int) -> None:
    try:
        if architecture not in architectures():
            pytest.skip(f"this NVRTC does not compile for {architecture}")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    plan = npu_compiler.compile(extracted(sizes, turned).ir, "cuda").main
    assert [kernel.entry for kernel in plan.kernels] == ["grouped_matmul"]
    check_plan_compiles(plan, architecture)


@pytest.mark.parametrize("architecture", [70, 90])
def test_sizes_of_no_whole_chunks_are_computed_plainly(architecture: int) -> None:
    try:
        architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    for ir in grouped_rows(30):
        plan = npu_compiler.compile(ir, "cuda").main
        assert [kernel.entry for kernel in plan.kernels] == ["grouped_matmul_plain"]
        check_plan_compiles(plan, architecture)


def test_counts_beyond_what_a_half_precision_holds_are_exact() -> None:
    ir = case("histc.default", floats(5000, low=0, high=3.99), bins=4, min=0, max=4).ir(torch.float32)
    x = torch.arange(5000, dtype=torch.float64).remainder(3).eq(2).double()
    (found,) = run_ir(ir, {"x0": x}, npu_runtime.Device("software-metal"))
    assert found.tolist() == [3334.0, 1666.0, 0.0, 0.0]
