"""Language models as CUDA sees them: few launches, and kernels that compile, on a machine without any GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

import npu_compiler
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.compiled_program import CompiledProgram
from tests.cuda.kernels import check_compile, kernels_for, one_of_each_form
from tests.support.decoders import make_decoder

_WIDTHS: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> CompiledProgram:
    """Two layers as wide as those of Qwen2.5-1.5B, with prefill of 16, 128 and 512."""
    lengths = (16, 128, 512)
    folder = make_decoder(tmp_path_factory.mktemp("qwen"), "Qwen2", 2048, lengths, **_WIDTHS).folder
    names = ("decode", *(f"prefill_{length}" for length in lengths))
    irs = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    return npu_compiler.compile(irs, target="cuda")


def entries(program: CompiledProgram, function: str) -> list[str]:
    plan = program.functions[function]
    return [plan.kernels[step.kernel].entry for step in plan.calls if isinstance(step, KernelCall)]


def test_a_layer_of_a_decode_step_is_five_launches(program: CompiledProgram) -> None:
    found = entries(program, "decode")
    start = found.index("attention_decode")
    following = found.index("attention_decode", start + 1)
    assert found[start:following] == ["attention_decode", "matvec", "matvec", "matvec", "matvec"]


@pytest.mark.parametrize("rows", [128, 512])
def test_products_of_a_prefill_go_by_the_copy_engine(program: CompiledProgram, rows: int) -> None:
    """Four in each layer, and one in the last, of which only one row is asked for."""
    assert entries(program, f"prefill_{rows}").count("matmul_bulk") == 5


def test_a_mask_is_summed_up_once(program: CompiledProgram) -> None:
    """For all layers of a step; in a prefill once more for the only row that the last layer is asked for."""
    for function in program.functions:
        assert entries(program, function).count("mask_states") == (1 if function == "decode" else 2)


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_kernels_compile(program: CompiledProgram, architecture: int) -> None:
    kernels = [kernel for plan in program.functions.values() for kernel in kernels_for(plan, architecture)]
    check_compile(one_of_each_form(kernels), architecture)
