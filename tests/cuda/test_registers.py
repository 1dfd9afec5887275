"""Kernels of decode steps keep in registers what they compute with: the rest would lie in memory, and nobody told."""

from __future__ import annotations

import pytest
import torch

from cuda_runtime.nvrtc import OPTIONS, compile_kernel
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.errors import KernelCompileError
from tests.cuda.test_attention_decode import Sizes, on_host
from tests.cuda.test_attention_decode import launch_of as attention_launch
from tests.cuda.test_grouped_matvec import Case
from tests.cuda.test_integer_rows import launch_of

pytestmark = pytest.mark.parametrize("architecture", [90])
REFUSED = ("--ptxas-options=--warn-on-spills", "--ptxas-options=--warning-as-error")  # where registers spill

CASES = [
    *(Case(m=m, n=2048, zeros=True, behind="norm ahead") for m in (1, 5, 8)),
    *(Case(m=m, n=17920, zeros=True, behind="norm ahead") for m in (1, 8)),
    Case(m=8, n=17920, bits=8, kind=torch.int8, group=1536, behind="norm ahead"),
    Case(m=8, n=1536, k=8960, zeros=True, behind="residual"),
]


def compile_in_registers(kernel: KernelSource, architecture: int) -> None:
    """Compiles a kernel; refuses one whose registers do not suffice."""
    options = (*(option for option in OPTIONS if option != "-w"), *REFUSED)
    compile_kernel(kernel.text, kernel.entry, architecture, options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_by_codes(case: Case, architecture: int) -> None:
    plan = case.program(torch.bfloat16).main
    compile_in_registers(plan.kernels[launch_of(plan).kernel], architecture)


def attention_of(sizes: Sizes) -> KernelSource:
    plan = on_host(sizes)
    return plan.kernels[attention_launch(plan).kernel]


@pytest.mark.parametrize("sizes", [Sizes(2048), Sizes(2048, rows=8), Sizes(32768)], ids=str)
def test_attention(sizes: Sizes, architecture: int) -> None:
    compile_in_registers(attention_of(sizes), architecture)


def test_too_few_registers_are_noticed(architecture: int) -> None:
    kernel = attention_of(Sizes(2048))
    text = kernel.text.replace("__launch_bounds__(THREADS, 2)", "__launch_bounds__(THREADS, 4)")
    with pytest.raises(KernelCompileError, match="spill"):
        compile_in_registers(KernelSource(kernel.entry, text), architecture)
