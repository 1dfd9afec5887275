"""Every kernel that the compiler writes compiles, for old and new GPUs, on a machine without any."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

import npu_compiler
from cuda_runtime.nvrtc import architectures, compile_kernel
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import KernelCompileError, MissingDependencyError
from npu_compiler.graph.lane_tokens import Feature, lane_row_ir, lane_rows_ir, lane_tokens_ir
from npu_compiler.graph.next_token import next_token_ir
from tests.cuda import kernels, shapes, test_prefill
from tests.cuda.kernels import check_compile, kernels_for, one_of_each_form
from tests.cuda.resnets import compiled_resnet
from tests.ops.cases import Case
from tests.ops.collected import COMPUTED

_ARCHITECTURES = (70, 80, 90)
_EVERY = 12  # of the op cases one in so many is compiled, beside the first of each op


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def _compile_all(programs: list[CompiledProgram], architecture: int) -> None:
    check_compile((kernel for program in programs for kernel in kernels_for(program.main, architecture)), architecture)


def _samples() -> list[Case]:
    first = {case.op: case for case in reversed(COMPUTED)}
    return [*first.values(), *islice(COMPUTED, 0, None, _EVERY)]


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_kernels_of_op_samples_compile(architecture: int) -> None:
    kinds = {70: torch.float16, 80: torch.bfloat16, 90: torch.float16}
    compute = kinds[architecture]
    name = str(compute).removeprefix("torch.")
    programs = [
        npu_compiler.compile(case.ir(torch.float32), "cuda", name) for case in _samples()[architecture // 10 :: 3]
    ]
    _compile_all(programs, architecture)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_kernels_of_all_sizes_compile(architecture: int) -> None:
    chosen = shapes.CASES[architecture // 10 % 3 :: 3]
    _compile_all([npu_compiler.compile(case.ir(torch.float32), "cuda") for case in chosen], architecture)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_kernels_of_prefill_compile(architecture: int) -> None:
    chosen = test_prefill.CASES[architecture // 10 % 3 :: 3]
    _compile_all([npu_compiler.compile(case.ir(torch.float32), "cuda") for case in chosen], architecture)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_kernels_that_choose_tokens_compile(architecture: int) -> None:
    kind = "float16" if architecture < 80 else "bfloat16"
    features = {70: set(), 80: {Feature.DRAWN}, 90: {*Feature}}[architecture]
    irs = [next_token_ir(151936, kind, 2048, drawn) for drawn in (False, True)]
    irs += [lane_tokens_ir((8, 1, 151936 - architecture), kind, 9, features), lane_row_ir(9, 151936, "int32")]
    irs += [lane_rows_ir(8, 9, {*Feature})]
    programs = [npu_compiler.compile(ir, "cuda", str(ir.get("compute_dtype", kind))) for ir in irs]
    _compile_all(programs, architecture)


def test_every_kernel_first_tells_how_many_threads_a_block_has() -> None:
    for case in COMPUTED[::_EVERY]:
        plan = npu_compiler.compile(case.ir(torch.float32), "cuda").main
        for call in plan.calls:
            if isinstance(call, KernelCall):
                text = plan.kernels[call.kernel].text
                threads = ", ".join(map(str, call.block))
                assert text.count(f"    know_places<{threads}>();\n") == text.count("know_places<") == 1


def test_refused_kernel_names_itself_and_the_reason() -> None:
    with pytest.raises(KernelCompileError, match=r"'broken' for compute capability 8\.0(.|\n)*nowhere"):
        compile_kernel('extern "C" __global__ void broken(int* x) { *x = nowhere; }', "broken", 80)


def test_texts_that_compile_together_see_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compiled(text: str, entry: str, *given: Any) -> bytes:
        calls.append(entry)
        return compile_kernel(text, entry, *given)

    monkeypatch.setattr(kernels, "compile_kernel", compiled)
    whole = '#define SIZE {0}\nstruct Params {{ int at[SIZE]; }};\nstatic_assert(sizeof(Params) == 4 * {0}, "");\n'
    whole += 'extern "C" __global__ void k(int* x, Params p) {{ *x = p.at[SIZE - 1]; }}'
    kernels.compile_together([(whole.format(size), ("k",)) for size in (1, 2, 3)], 80)
    assert calls == ["k, k, k"]
    lacking = 'extern "C" __global__ void lacks(int* x) { Params p; *x = SIZE; }'
    with pytest.raises(KernelCompileError, match="'lacks' for compute capability"):
        kernels.compile_together([(whole.format(1), ("k",)), (lacking, ("lacks",))], 80)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_kernels_of_resnets_compile(architecture: int) -> None:
    programs = compiled_resnet("resnet18", 1), compiled_resnet("resnet50", 64)
    every = [kernel for program in programs for kernel in kernels_for(program.main, architecture)]
    check_compile(one_of_each_form(every), architecture)


@pytest.mark.parametrize(("name", "launches"), [("resnet18", 20), ("resnet50", 52)])
def test_each_convolution_takes_its_norm_addition_and_activation_along(name: str, launches: int) -> None:
    """A launch for each convolution but the shortcuts, each pooling and each product."""
    assert len(compiled_resnet(name, 1).main.calls) == launches
