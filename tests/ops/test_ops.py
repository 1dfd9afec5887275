"""Every op against torch in float64, in both half precisions, or refused with its reason."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.errors import NPUError, UnsupportedOpError
from npu_compiler.ops import definition, get_supported_ops
from npu_runtime import Device
from tests.ops.cases import MODEL, Case
from tests.ops.collected import CASES, COMPUTED
from tests.support.running import run_ir

REFUSED = [case for case in CASES if case.refusal]
FLOATING = [case for case in COMPUTED if any(operand.dtype == MODEL for operand in case.operands())]
# of each op the first case: what another data type changes are loads and stores, which one case shows
HALF_MODELS = list({case.op: case for case in reversed(FLOATING)}.values())
BOTH = pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
# covered by every case of an op with several results; removed by the extraction; no ATen op, made by torch.export; the
# next two give statistics of another size on the CPU than elsewhere: tests of spellings and of absent tensors have them
ELSEWHERE = {"getitem", "aten._assert_tensor_metadata.default", "wrap_with_set_grad_enabled"}
ELSEWHERE |= {"aten.native_batch_norm.default", "aten._native_batch_norm_legit_no_training.default"}
ELSEWHERE |= {"aten.embedding_bag.default", "aten.embedding_bag.padding_idx"}  # whose further results differ as well
ELSEWHERE |= {"aten._weight_int8pack_mm.default"}  # which torch has not in float64: tests of codes have it
ELSEWHERE |= {"aten._weight_int4pack_mm.default"}  # which torch has on CUDA alone: tests of spellings have it
# nor these: tests/quantised has them
ELSEWHERE |= {op for op in get_supported_ops() if op.startswith(("npu_codes.", "torchao.", "quantized_decomposed."))}
ELSEWHERE |= {op for op in get_supported_ops() if op.startswith("npu_tokens.")}  # tests/lanes has them
ELSEWHERE |= {f"aten.{name}.data" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}  # which need values to export
ELSEWHERE |= {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}  # tests of experts have them
ELSEWHERE |= {
    "rewritten.filter_codes.default",
    "rewritten.coded_convolution.default",
    "rewritten.max_pool_codes.default",
}  # tests of codes have them
# tests of rewrites and of the forms of attention have these
ELSEWHERE |= {f"rewritten.{name}.default" for name in ("capped_attention", "attention_with_sinks")}
ELSEWHERE |= {  # whose further results nobody reads: tests of the forms of attention have them
    f"aten._scaled_dot_product_{form}.default"
    for form in (
        *("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"),
        *("fused_attention_overrideable", "attention_math"),
    )
}

ELSEWHERE |= {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}  # of any values
FLOAT32_ROUNDOFF = 2.0**-24


_irs: dict[tuple[int, torch.dtype], tuple[Case, dict[str, Any]]] = {}
_programs: dict[tuple[int, str], bytes] = {}  # of cases whose IR is above, and of a target


def _ir(case: Case, model: torch.dtype) -> dict[str, Any]:
    """The IR of a case, made once for all devices and data types."""
    key = id(case), model  # not its text, which leaves out what a view is called with
    if key not in _irs:
        _irs[key] = case, case.ir(model)
    return _irs[key][1]


def check(case: Case, model: torch.dtype, compute: torch.dtype, device: Device) -> None:
    """Runs a case and compares every output."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    tensors = [operand.tensor(generator, compute) for operand in case.operands()]
    ir = _ir(case, model)
    if case.targets and device.target not in case.targets:
        with pytest.raises(UnsupportedOpError, match=f"the target '{device.target}' has no kernel for"):
            npu_compiler.compile(ir, target=device.target)
        return
    inputs = {f"x{i}": tensor for i, tensor in enumerate(tensors)}
    results = run_ir(ir, inputs, device, str(compute).removeprefix("torch."))
    for result, expected, declared in zip(results, case.expected(tensors), ir["graph_outputs"], strict=True):
        assert result.dtype.name == declared["dtype"]
        assert list(result.shape) == declared["shape"]
        if expected.dtype.is_floating_point:
            _compare(result.astype(np.float64), expected.double(), case, tensors, compute)
        else:
            np.testing.assert_array_equal(result, expected.numpy())


def _compare(
    result: NDArray[Any], expected: torch.Tensor, case: Case, tensors: list[torch.Tensor], compute: torch.dtype
) -> None:
    """Compares within what the arithmetic allows.

    Inputs are exact. A kernel computes in float32, whose errors are a small multiple of its unit roundoff times the
    largest magnitude involved (`absolute`, which also covers the subnormal numbers of float16, 2^-24 apart), and rounds
    the result to the compute dtype: a relative error of that dtype's unit roundoff, half of its epsilon. A value that
    is stored on the way is rounded as well, relative to its own magnitude.
    """
    unit = torch.finfo(compute).eps / 2
    finite = [tensor[tensor.isfinite()].double().abs() for tensor in (*tensors, expected)]
    largest = max([1.0, *(float(magnitudes.max()) for magnitudes in finite if magnitudes.numel())])
    absolute = (64 * FLOAT32_ROUNDOFF + (case.stores - 1) * unit) * largest
    rounded = expected.to(compute).double()  # too large a number becomes infinite
    reference = torch.where(rounded.isinf(), rounded, expected).numpy()
    np.testing.assert_allclose(result, reference, rtol=unit * (1 + unit), atol=absolute, equal_nan=True)


@pytest.mark.parametrize("case", COMPUTED, ids=str)
def test_equals_torch(case: Case, device: Device) -> None:
    check(case, torch.float32, torch.float16, device)


@pytest.mark.parametrize("case", HALF_MODELS, ids=str)
def test_equals_torch_in_bfloat16(case: Case, device: Device) -> None:
    check(case, torch.float32, torch.bfloat16, device)


@BOTH
@pytest.mark.parametrize("case", HALF_MODELS, ids=str)
def test_equals_torch_in_a_half_precision_model(case: Case, compute: torch.dtype, device: Device) -> None:
    check(case, compute, compute, device)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_is_refused_with_its_reason(case: Case, device: Device) -> None:
    ir = case.ir(torch.float32)
    with pytest.raises(UnsupportedOpError) as caught:
        npu_compiler.compile(ir, target=device.target)
    assert case.refusal in caught.value.reason
    assert caught.value.op == case.op
    node = next(node for node in ir["nodes"] if node["op_type"] == case.op)
    support = npu_compiler.is_op_supported(node, device.target)
    assert not support
    assert case.refusal in support.reason


WITH_CASES = {case.op for case in CASES}


def test_every_op_has_a_case_or_an_alias_that_has() -> None:
    for op in get_supported_ops():
        if op not in WITH_CASES | ELSEWHERE:
            assert _siblings(op), f"{op} has no case"


def _siblings(op: str) -> list[Case]:
    entry = definition(op)
    return [case for case in COMPUTED if definition(case.op) is entry]


@pytest.mark.parametrize("op", sorted(set(get_supported_ops()) - WITH_CASES - ELSEWHERE))
def test_alias_gives_the_same_program(op: str, device: Device) -> None:
    """An in-place variant, or another name, of an op with cases: both names must compile to the same program."""
    compared = 0
    siblings = [case for case in _siblings(op) if not case.targets or device.target in case.targets]
    for case in siblings:
        other = Case(op, case.args, case.kwargs)
        try:
            ir = other.ir(torch.float32)
        except (RuntimeError, TypeError):  # torch itself takes no such arguments, or no such result in place
            continue
        original = _ir(case, torch.float32)
        if ir["graph_outputs"] != original["graph_outputs"]:
            continue
        ir["model_name"] = original["model_name"]
        key = id(case), device.target
        if key not in _programs:
            _programs[key] = _program_bytes(original, device)
        assert _program_bytes(ir, device) == _programs[key]
        compared += 1
    assert compared or not siblings


def _program_bytes(ir: dict[str, Any], device: Device) -> bytes:
    try:
        return npu_compiler.compile(ir, target=device.target).to_bytes()
    except NPUError as error:
        pytest.fail(str(error))
