"""Indices beyond their tensor on CUDA: kernels compile anywhere; on a device no memory is touched for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_runtime import CUDAExecutor, CUDATensor
from cuda_runtime.nvrtc import architectures
from npu_compiler.artifact.plan import KernelCall, Role
from npu_compiler.errors import InputError, MissingDependencyError
from npu_runtime import Device
from npu_runtime.faults import FaultRecord
from tests.cuda.kernels import check_plan_compiles
from tests.ops.indexed import GRAPHS, Indexed, indexed_ir
from tests.ops.test_indices import KINDS, hostile


@cache
def indexed(name: str, kind: str, device: Device) -> Indexed:
    ids, compute = KINDS[kind]
    return Indexed(name, device, compute, ids, CUDAExecutor)


def executor_of(graph: Indexed) -> CUDAExecutor:
    assert isinstance(graph.executor, CUDAExecutor)
    return graph.executor


@pytest.mark.parametrize("architecture", [70, 90])
def test_kernels_compile(architecture: int) -> None:
    try:
        architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    ids, compute = KINDS["int64, float16" if architecture == 70 else "int32, bfloat16"]
    for name in GRAPHS:
        check_plan_compiles(npu_compiler.compile(indexed_ir(name, compute, ids), target="cuda").main, architecture)


@pytest.mark.parametrize("name", ["decode", "decode of two tokens"])
def test_attention_checks_the_places_that_it_writes_to(name: str) -> None:
    """One launch, as without checks, that binds the record of faults."""
    plan = npu_compiler.compile(indexed_ir(name, torch.float16, torch.int64), target="cuda").main
    (call,) = plan.calls
    assert isinstance(call, KernelCall)
    assert plan.kernels[call.kernel].entry == "attention_decode"
    assert Role.FAULTS in {plan.buffers[argument.buffer].role for argument in call.args}
    assert [check.tensor for check in plan.checks] == ["ids", "ids"]


def test_an_output_asks_for_the_faults_of_its_run() -> None:
    """Without a GPU: the tensor of another device does as well."""
    device = Device("software-metal")
    plan = npu_compiler.compile(indexed_ir("embedding", torch.float16, torch.int64), device.target).main
    faults, (spec,) = FaultRecord(plan, device.backend), plan.outputs
    before, output = (CUDATensor(device, device.backend.allocate(spec.nbytes), spec) for _ in range(2))
    before.watch(faults)
    before.to_numpy()
    output.watch(faults)
    assert faults.memory is not None
    with faults.memory.writing() as content:
        content.view(np.int32)[:] = 1, 2, 5000, 0
    for _ in range(2):
        with pytest.raises(InputError, match=r"'ids': given the index 5000 at position \[0, 2\], expected 0 to 9"):
            output.to_numpy()
    assert before.to_numpy().shape == spec.shape


@pytest.mark.parametrize("sync", [True, False], ids=["waiting", "not waiting"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_index_reads_or_writes_beyond_its_tensor(name: str, kind: str, sync: bool, device: Device) -> None:
    graph = indexed(name, kind, device)
    count = int(np.prod(graph.graph.ids))
    for value in (0, *hostile(graph)):
        graph.check([value, *range(1, count)], sync=sync)


def test_without_waiting_the_error_comes_with_the_output(device: Device) -> None:
    graph = indexed("embedding", "int64, float16", device)
    (output,) = executor_of(graph).run(graph.inputs([5000] * 6), sync=False).values()
    for _ in range(2):  # however often somebody asks for what that run did not make
        with pytest.raises(InputError, match="'ids': given the index 5000 at"):
            output.to_numpy()
    graph.check([1] * 6)


def test_without_waiting_the_error_comes_with_the_next_run_that_waits(device: Device) -> None:
    graph = indexed("embedding", "int64, float16", device)
    executor_of(graph).run(graph.inputs([2**32 + 3] * 6), sync=False)
    with pytest.raises(InputError, match=f"'ids': given the index {2**32 + 3} at"):
        graph.executor.run(graph.inputs([1] * 6))
    graph.check([1] * 6)


def test_an_output_stays_when_a_later_run_fails(device: Device) -> None:
    graph = indexed("embedding", "int64, float16", device)
    (output,) = graph.executor.run(graph.inputs([1] * 6)).values()
    with pytest.raises(InputError):
        graph.executor.run(graph.inputs([-1] * 6))
    np.testing.assert_allclose(output.to_numpy(), graph.expected([1] * 6)[0], atol=0.02)


def test_a_fault_in_place_leaves_the_rest(device: Device) -> None:
    graph = indexed("decode of two tokens", "int64, float16", device)
    inputs = graph.inputs([5000, 7])
    with pytest.raises(InputError, match="given the index 5000"):
        executor_of(graph).run(inputs)
    for cache_, new in ((0, 2), (1, 3)):
        expected = graph.floats[cache_].clone()
        expected[:, :, 7] = graph.floats[new][:, :, 1]
        np.testing.assert_array_equal(inputs[f"x{cache_}"].to_numpy(), expected.numpy())


def test_integers_of_another_library_are_not_wrapped_around(device: Device) -> None:
    graph = indexed("embedding", "int32, bfloat16", device)
    inputs = {**graph.inputs([1] * 6), "ids": torch.full((2, 3), 2**32 + 3, device="cuda")}
    with pytest.raises(InputError, match="given int64, expected int32"):
        executor_of(graph).run(inputs)
