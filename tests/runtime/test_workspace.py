"""Executors that share memory for intermediate tensors."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, InputError
from npu_runtime import Device, Executor, NPUBuffer
from npu_runtime.backend import Backend
from npu_runtime.workspace import Workspace
from tests.support.ir_builder import IRBuilder


def _program(size: int, device: Device) -> CompiledProgram:
    """out = (x @ x) @ x, which needs an arena for the first product."""
    builder = IRBuilder("power")
    x = builder.input("x", (size, size), torch.float16)
    builder_output = builder.call("aten.mm.default", builder.call("aten.mm.default", x, x), x)
    return npu_compiler.compile(builder.build(builder_output), device.target)


def _run(executor: Executor, x: NDArray[Any]) -> NDArray[Any]:
    (spec,) = executor.plan.inputs
    (output,) = executor.run({"x": NPUBuffer.from_numpy(x, executor.device, spec=spec)}).values()
    return output.to_numpy()


@pytest.fixture
def sizes(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each buffer that is allocated."""
    found: list[int] = []
    allocate = device.backend.allocate

    def counted(nbytes: int) -> Any:
        found.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(device.backend, "allocate", counted)
    return found


@pytest.mark.parametrize("order", [(64, 128), (128, 64)])
def test_two_executors_take_the_memory_of_the_larger(
    device: Device, sizes: list[int], order: tuple[int, int], rng: np.random.Generator
) -> None:
    workspace = Workspace(device.backend)
    executors = [Executor(_program(size, device), device, workspace=workspace) for size in order]
    arenas = [executor.plan.arena_bytes for executor in executors]
    assert min(arenas) > 0
    assert sizes == ([max(arenas)] if order[0] > order[1] else sorted(arenas))
    for executor in (*executors, *executors):
        size = executor.plan.inputs[0].shape[0]
        x = (rng.standard_normal((size, size)) / size**0.5).astype(np.float16)
        np.testing.assert_allclose(_run(executor, x), x.astype(np.float64) @ x @ x, atol=5e-3)
    assert {arena.nbytes for executor in executors for arena in workspace.arenas(executor.plan).values()} == {
        max(arenas)
    }


def test_without_one_each_executor_has_its_own(device: Device, sizes: list[int]) -> None:
    program = _program(64, device)
    executors = [Executor(program, device) for _ in range(2)]
    assert sizes == [executor.plan.arena_bytes for executor in executors]


def test_what_is_bound_runs_on_the_memory_given(device: Device, rng: np.random.Generator) -> None:
    executor = Executor(_program(64, device), device)
    (given,), (made,) = executor.plan.inputs, executor.plan.outputs
    x = (rng.standard_normal((64, 64)) / 8).astype(np.float16)
    inputs = {"x": NPUBuffer.from_numpy(x, device, spec=given)}
    outputs = {made.name: NPUBuffer(device, device.backend.allocate(made.nbytes), made)}
    recording = device.backend.record([executor.bind(inputs, outputs)])
    for factor in (1, 2):
        device.backend.write(factor * x, given, inputs["x"].data)
        recording.launch()()
        expected = factor**3 * (x.astype(np.float64) @ x @ x)
        np.testing.assert_allclose(outputs[made.name].to_numpy(), expected, atol=2e-2)


def test_a_bound_executor_is_called_again_and_again(device: Device, rng: np.random.Generator) -> None:
    executor = Executor(_program(64, device), device)
    (given,), (made,) = executor.plan.inputs, executor.plan.outputs
    x = (rng.standard_normal((64, 64)) / 8).astype(np.float16)
    inputs = {"x": NPUBuffer.from_numpy(x, device, spec=given)}
    outputs = {made.name: NPUBuffer(device, device.backend.allocate(made.nbytes), made)}
    step = executor.bind(inputs, outputs)
    for factor in (1, 2, 3):
        device.backend.write(factor * x, given, inputs["x"].data)
        step(sync=factor > 1)
        expected = factor**3 * (x.astype(np.float64) @ x @ x)
        np.testing.assert_allclose(outputs[made.name].to_numpy(), expected, atol=5e-2)
    with pytest.raises(DeviceError, match="no streams"):
        step(stream=0)
    gone = weakref.ref(step)
    del step
    assert gone() is None  # and with it what it held, without the garbage collector


def test_what_is_bound_must_not_lie_in_each_other(device: Device) -> None:
    executor = Executor(_program(64, device), device)
    (given,), (made,) = executor.plan.inputs, executor.plan.outputs
    buffer = NPUBuffer(device, device.backend.allocate(given.nbytes), given)
    with pytest.raises(InputError, match=f"output '{made.name}': given the memory of input 'x'"):
        executor.bind({"x": buffer}, {made.name: NPUBuffer(device, buffer.data, made)})


def test_memory_for_outputs_must_fit(device: Device) -> None:
    executor = Executor(_program(64, device), device)
    inputs = {"x": NPUBuffer.zeros((64, 64), device)}
    with pytest.raises(InputError, match="given memory for the outputs none, expected 'mm"):
        executor.bind(inputs, {})
    name = executor.plan.outputs[0].name
    with pytest.raises(InputError, match=r"output 'mm.*given float16 \(8, 8\)"):
        executor.bind(inputs, {name: NPUBuffer.zeros((8, 8), device)})
    other = Device(type(device.backend)())
    with pytest.raises(InputError, match=r"output 'mm.*given a buffer on"):
        executor.bind(inputs, {name: NPUBuffer.zeros((64, 64), other)})


def test_buffers_allocated_together_do_not_overlap(device: Device) -> None:
    sizes = [1, 300, 0, 4096]
    backend: Backend = device.backend
    buffers = backend.allocate_all(sizes)
    assert [buffer.nbytes for buffer in buffers] == sizes
    for number, buffer in enumerate(buffers):
        with buffer.writing() as memory:
            memory[:] = number
    assert [set(buffer.reading().tolist()) for buffer in buffers] == [{0}, {1}, set(), {3}]
    assert backend.allocate_all([]) == []
    backend.clear(buffers[3])
    assert not buffers[3].reading().any()
