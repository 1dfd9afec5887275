"""What the CUDA executor adds, on a device: tensors of other libraries, streams, outputs that stay, clear errors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

import npu_compiler
from cuda_runtime import CUDABackend, CUDAExecutor, CUDATensor
from npu_compiler.errors import DeviceError, InputError, OutOfMemoryError, TargetMismatchError
from npu_runtime import Device, NPUBuffer
from npu_runtime.profiler import Profiler
from tests.ops.cases import case, floats

SHAPE = (3, 4, 5, 6)


@pytest.fixture
def executor(device: Device) -> CUDAExecutor:
    """out = x0 + x1, for float16 tensors."""
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.float16)
    return CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)


def _pair(rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    a, b = (rng.standard_normal(SHAPE).astype(np.float16) for _ in range(2))
    return a, b


def _only(outputs: dict[str, CUDATensor]) -> CUDATensor:
    (output,) = outputs.values()
    return output


def test_torch_tensors_are_inputs_and_outputs(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    a, b = _pair(rng)
    output = _only(executor.run({"x0": torch.from_numpy(a).cuda(), "x1": torch.from_numpy(b).cuda()}))
    shared = from_dlpack(output)
    assert shared.data_ptr() == output.data.pointer
    np.testing.assert_array_equal(shared.cpu().numpy(), a + b)
    np.testing.assert_array_equal(output.to_numpy(), a + b)


def test_cupy_arrays_of_any_strides_are_inputs(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    a, b = _pair(rng)
    strided = cupy.asarray(np.ascontiguousarray(a.transpose(3, 1, 0, 2))).transpose(2, 1, 3, 0)
    output = _only(executor.run({"x0": strided, "x1": cupy.asarray(b)}))
    np.testing.assert_array_equal(cupy.asarray(output).get(), a + b)


def test_outputs_stay_when_the_executor_runs_again(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    a, b = _pair(rng)
    inputs = {"x0": torch.from_numpy(a).cuda(), "x1": torch.from_numpy(b).cuda()}
    first = _only(executor.run(inputs))
    inputs["x0"] += 1
    second = _only(executor.run(inputs))
    np.testing.assert_array_equal(first.to_numpy(), a + b)
    assert not np.array_equal(second.to_numpy(), first.to_numpy())


def test_runs_on_a_stream_of_torch_are_ordered(executor: CUDAExecutor) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = torch.zeros(SHAPE, dtype=torch.float16, device="cuda")
        torch.cuda._sleep(20_000_000)
        a += 3
        output = _only(executor.run({"x0": a, "x1": a}, stream=stream))
        doubled = from_dlpack(output) * 2
    assert bool((doubled == 12).all())


def test_a_run_that_is_not_waited_for_gives_its_result(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    a, b = _pair(rng)
    inputs = {"x0": torch.from_numpy(a).cuda(), "x1": torch.from_numpy(b).cuda()}
    outputs = [_only(executor.run(inputs, sync=False)) for _ in range(20)]
    assert all(np.array_equal(output.to_numpy(), a + b) for output in outputs)


def test_inputs_that_do_not_fit_are_refused(executor: CUDAExecutor) -> None:
    good = torch.zeros(SHAPE, dtype=torch.float16, device="cuda")
    for bad in (good[:2], good.long(), np.zeros(SHAPE[1:], np.float16), np.zeros(SHAPE, np.int64), "zeros"):
        with pytest.raises(InputError, match="x1"):
            executor.run({"x0": good, "x1": bad})
    executor.run({"x0": good, "x1": good})  # the process stays usable


def test_a_second_thread_is_refused(executor: CUDAExecutor) -> None:
    good = torch.zeros(SHAPE, dtype=torch.float16, device="cuda")
    caught: list[Exception] = []

    def run() -> None:
        try:
            executor.run({"x0": good, "x1": good})
        except DeviceError as error:
            caught.append(error)

    with executor._lock:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "executor of its own" in str(caught[0])


def test_too_little_memory_says_how_much_is_free(device: Device) -> None:
    with pytest.raises(OutOfMemoryError, match=r"free, a buffer of 4\.0 TiB"):
        device.backend.allocate(1 << 42)
    assert isinstance(device.backend, CUDABackend)
    device.backend.allocate(1 << 20)


def test_a_program_for_another_target_is_refused(device: Device) -> None:
    ir = case("add.Tensor", floats(4), floats(4)).ir(torch.float16)
    with pytest.raises(TargetMismatchError, match="cuda"):
        CUDAExecutor(npu_compiler.compile(ir, target="metal"), device)


def test_the_profiler_times_every_step(executor: CUDAExecutor, device: Device, rng: np.random.Generator) -> None:
    specs = {spec.name: spec for spec in executor.plan.inputs}
    a, b = _pair(rng)
    profiler = Profiler(executor)
    arrays = {"x0": a, "x1": b}
    profiler.run({name: NPUBuffer.from_numpy(array, device, spec=specs[name]) for name, array in arrays.items()})
    profile = profiler.profile()
    assert [kernel.name for kernel in profile.kernels] == ["elementwise"]
    assert profile.kernels[0].seconds > 0


def test_bfloat16_travels_by_dlpack(device: Device, rng: np.random.Generator) -> None:
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.bfloat16)
    executor = CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)
    a, b = (torch.from_numpy(x).to(torch.bfloat16).cuda() for x in _pair(rng))
    output = from_dlpack(_only(executor.run({"x0": a, "x1": b})))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, a + b)
