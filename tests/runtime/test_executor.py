"""Programs replayed on the software GPU."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from metal_runtime.metal_api import software_metal
from npu_compiler.artifact.plan import Argument, KernelCall, KernelSource, LibraryCall
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, InputError, KernelCompileError, TargetMismatchError, WeightError
from npu_runtime import Device, Executor, MetalBackend, NPUBuffer, Weights, load_weights
from tests.runtime.plans import AXPY, SHAPE, axpy_plan, axpy_program, counter_program, padded_program

W = np.linspace(-1, 1, 20, dtype=np.float32).reshape(SHAPE)


@pytest.fixture(scope="module")
def executor(device: Device) -> Executor:
    return Executor(axpy_program(), device)


@pytest.fixture(scope="module")
def weights(device: Device) -> Weights:
    return load_weights({"layer.weight": W}, axpy_program(), device)


def x_of(value: float, device: Device) -> NPUBuffer:
    return NPUBuffer.from_numpy(np.full(SHAPE, value, np.float32), device, spec=axpy_program().input_specs[0])


def integers(device: Device, *values: int) -> NPUBuffer:
    return NPUBuffer.from_numpy(
        np.array(values * (8 // len(values)), np.int64), device, counter_program().input_specs[0]
    )


def expected(x: float | NDArray[Any]) -> NDArray[Any]:
    return np.asarray(3 * (2 * x + W) + x)


def test_a_run_gives_what_the_steps_compute(device: Device, executor: Executor, weights: Weights) -> None:
    outputs = executor.run(inputs={"x": x_of(0.5, device)}, weights=weights)
    assert list(outputs) == ["out"]
    result = outputs["out"].to_numpy(spec=axpy_program().output_specs[0])
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected(0.5), atol=4e-3)


def test_a_second_run_does_not_change_the_first_result(device: Device, executor: Executor, weights: Weights) -> None:
    first = executor.run({"x": x_of(1.0, device)}, weights)["out"]
    second = executor.run({"x": x_of(-2.0, device)}, weights)["out"]
    np.testing.assert_allclose(first.to_numpy(), expected(1.0), atol=8e-3)
    np.testing.assert_allclose(second.to_numpy(), expected(-2.0), atol=2e-2)


def test_a_program_from_a_file_runs(device: Device, weights: Weights, tmp_path: Path) -> None:
    axpy_program().save(tmp_path / "axpy.npubin")
    loaded = CompiledProgram.load(tmp_path / "axpy.npubin")
    result = Executor(loaded, device).run({"x": x_of(0.5, device)}, weights)["out"]
    np.testing.assert_allclose(result.to_numpy(), expected(0.5), atol=4e-3)


def test_padded_and_reordered_tensors(device: Device) -> None:
    program = padded_program()
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    weights = load_weights({"layer.weight": -x}, program, device)
    outputs = Executor(program, device).run({"x": NPUBuffer.from_numpy(x, device, program.input_specs[0])}, weights)
    np.testing.assert_allclose(outputs["out"].to_numpy(program.output_specs[0]), 7 * x - 3 * x, rtol=1e-3)
    assert not outputs["out"].data.reading().view(np.float16).reshape(4, 5)[:, 3:].any()


def test_a_state_is_updated_in_its_own_buffer(device: Device) -> None:
    executor = Executor(counter_program(), device)
    counter, step = integers(device, 10), integers(device, 3)
    first = executor.run({"counter": counter, "step": step})
    assert first["counter_out"].data is counter.data
    np.testing.assert_array_equal(counter.to_numpy(), np.full(8, 13))
    second = executor.run({"counter": first["counter_out"], "step": step})
    np.testing.assert_array_equal(second["counter_out"].to_numpy(), np.full(8, 16))
    np.testing.assert_array_equal(first["before"].to_numpy(), np.full(8, 10))
    np.testing.assert_array_equal(second["before"].to_numpy(), np.full(8, 13))


def test_a_state_that_is_also_another_input_is_refused(device: Device) -> None:
    counter = integers(device, 1)
    with pytest.raises(InputError, match="'counter' is updated in place and is the same buffer as 'step'"):
        Executor(counter_program(), device).run({"counter": counter, "step": counter})


def test_a_function_is_chosen_by_name(device: Device, weights: Weights) -> None:
    doubled = replace(axpy_plan(), steps=(axpy_plan().steps[0], *axpy_plan().steps))
    program = replace(axpy_program(), functions={"main": axpy_plan(), "other": doubled})
    assert len(Executor(program, device).plan.steps) == 2
    assert len(Executor(program, device, function="other").plan.steps) == 3
    with pytest.raises(InputError, match="given the function 'decode', expected one of 'main', 'other'"):
        Executor(program, device, function="decode")


def test_runs_from_many_threads_do_not_mix(device: Device, executor: Executor, weights: Weights) -> None:
    values = [float(n) for n in range(-8, 8)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda v: executor.run({"x": x_of(v, device)}, weights)["out"].to_numpy(), values))
    for value, result in zip(values, results, strict=True):
        np.testing.assert_allclose(result, expected(value), atol=5e-2)


def test_wrong_input_names_are_listed(device: Device, executor: Executor, weights: Weights) -> None:
    with pytest.raises(InputError, match=r"given the inputs 'y', expected 'x'; missing: 'x'; not expected: 'y'"):
        executor.run({"y": x_of(1, device)}, weights)
    with pytest.raises(InputError, match=r"given the inputs none, expected 'x'; missing: 'x'$"):
        executor.run({}, weights)
    with pytest.raises(InputError, match=r"not expected: 'y'$"):
        executor.run({"x": x_of(1, device), "y": x_of(1, device)}, weights)


@pytest.mark.parametrize(
    ("array", "given"),
    [
        (np.zeros((5, 4), np.float16), r"float16 \(5, 4\) in 40 bytes"),
        (np.zeros(SHAPE, np.int16), r"int16 \(4, 5\) in 40 bytes"),
        (np.zeros(SHAPE, np.float32), r"float32 \(4, 5\) in 80 bytes"),
        (np.zeros((4, 5, 1), np.float16), r"float16 \(4, 5, 1\)"),
    ],
)
def test_a_buffer_of_another_tensor_is_refused(
    device: Device, executor: Executor, weights: Weights, array: NDArray[Any], given: str
) -> None:
    message = rf"input 'x': given {given}.*, expected float16 \(4, 5\) in 40 bytes .* NPUBuffer.from_numpy"
    with pytest.raises(InputError, match=message):
        executor.run({"x": NPUBuffer.from_numpy(array, device)}, weights)


def test_a_buffer_in_another_layout_is_refused(device: Device) -> None:
    program = padded_program()
    weights = load_weights({"layer.weight": np.zeros((1, 3, 2, 2), np.float32)}, program, device)
    dense = NPUBuffer.zeros((1, 3, 2, 2), device, alloc_shape=(1, 5, 2, 2))
    with pytest.raises(InputError, match=r"with strides \(20, 4, 2, 1\), expected .* strides \(20, 1, 10, 5\)"):
        Executor(program, device).run({"x": dense}, weights)


def test_anything_but_arrays_and_buffers_is_refused_with_the_call_that_makes_one(
    executor: Executor, weights: Weights
) -> None:
    with pytest.raises(
        InputError, match=r"'x': given a list, expected an array or an NPUBuffer; .* NPUBuffer.from_numpy\(array"
    ):
        executor.run({"x": [[1.0] * 5] * 4}, weights)


def test_a_buffer_on_another_device_is_refused(executor: Executor, weights: Weights) -> None:
    other = Device(MetalBackend(software_metal()))
    with pytest.raises(InputError, match="given a buffer on Device"):
        executor.run({"x": x_of(1, other)}, weights)


def test_missing_and_foreign_weights_are_refused(device: Device, executor: Executor) -> None:
    x = {"x": x_of(1, device)}
    with pytest.raises(WeightError, match="given no weights, expected 1; load them by load_weights"):
        executor.run(x)
    with pytest.raises(WeightError, match=r"the weights of another program: 1 of 1 .* such as 'w'"):
        executor.run(x, Weights(device.backend, {"v": device.backend.allocate(40)}))
    with pytest.raises(WeightError, match="of another size"):
        executor.run(x, Weights(device.backend, {"w": device.backend.allocate(8)}))
    other = Device(MetalBackend(software_metal()))
    with pytest.raises(WeightError, match="given weights on"):
        executor.run(x, load_weights({"layer.weight": W}, axpy_program(), other))


def test_other_weights_are_used_at_the_next_run(device: Device, executor: Executor, weights: Weights) -> None:
    zero = load_weights({"layer.weight": np.zeros_like(W)}, axpy_program(), device)
    for chosen, value in ((weights, expected(1.0)), (zero, np.full(SHAPE, 7)), (weights, expected(1.0))):
        np.testing.assert_allclose(executor.run({"x": x_of(1, device)}, chosen)["out"].to_numpy(), value, atol=8e-3)


def test_a_program_for_another_target_is_refused_with_the_remedy(device: Device) -> None:
    program = replace(axpy_program(), target="cuda")
    message = r"compiled for the target 'cuda'.*npu_compiler.compile\(ir, target='metal'\).*--target metal"
    with pytest.raises(TargetMismatchError, match=message):
        Executor(program, device)


def with_plan(**changes: Any) -> CompiledProgram:
    return replace(axpy_program(), functions={"main": replace(axpy_plan(), **changes)})


def changed_step(**changes: Any) -> CompiledProgram:
    first, second = axpy_plan().steps
    assert isinstance(second, KernelCall)
    return with_plan(steps=(first, replace(second, **changes)))


def test_a_kernel_that_does_not_compile_is_refused_with_the_compilers_words(device: Device) -> None:
    broken = KernelSource("axpy", AXPY.text.replace("params.factor", "params.nonsense"))
    with pytest.raises(KernelCompileError, match=r"(?s)refused 'axpy'.*nonsense"):
        Executor(with_plan(kernels=(broken,)), device)


def test_an_entry_that_is_not_in_the_source_is_refused(device: Device) -> None:
    with pytest.raises(KernelCompileError, match="has no kernel 'saxpy', it has: axpy"):
        Executor(with_plan(kernels=(KernelSource("saxpy", AXPY.text),)), device)


def test_kernels_of_one_text_are_told_apart(device: Device, weights: Weights) -> None:
    text = AXPY.text + AXPY.text[AXPY.text.index("kernel") :].replace("axpy", "axmy").replace(" + ", " - ")
    program = with_plan(kernels=(KernelSource("axpy", text), KernelSource("axmy", text)))
    first, second = program.main.steps
    assert isinstance(second, KernelCall)
    program = replace(program, functions={"main": replace(program.main, steps=(first, replace(second, kernel=1)))})
    result = Executor(program, device).run({"x": x_of(0.5, device)}, weights)["out"]
    np.testing.assert_allclose(result.to_numpy(), 3 * (1 + W) - 0.5, atol=4e-3)


def test_a_library_call_is_refused(device: Device) -> None:
    call = LibraryCall("product", "gemm", (Argument(0, 0),), {})
    with pytest.raises(DeviceError, match="step 'product' calls the library routine 'gemm'"):
        Executor(with_plan(steps=(*axpy_plan().steps, call)), device)


def test_too_many_threads_are_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="step 'outer' launches 'axpy' with 2048 threads"):
        Executor(changed_step(block=(64, 32, 1)), device)


def test_a_failure_on_the_device_names_the_step(device: Device, weights: Weights) -> None:
    unbound = Executor(changed_step(args=(), params=b""), device)
    x = {"x": x_of(1, device)}
    with pytest.raises(DeviceError, match="outer"):
        unbound.run_timed(x, weights)
    past_the_end = Executor(changed_step(args=(Argument(2, 512), Argument(0, 0), Argument(3, 0))), device)
    with pytest.raises(DeviceError, match="step 'outer'"):
        past_the_end.run(x, weights)


def test_a_kernel_that_fails_while_it_runs_is_reported(device: Device, weights: Weights) -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    barrier = f"if (i < 3) {{ {barrier} }} else {{ simd_sum(params.factor); {barrier} }}\n    if (i < params.count)"
    divergent = KernelSource("axpy", AXPY.text.replace("if (i < params.count)", barrier))
    executor, x = Executor(with_plan(kernels=(divergent,)), device), {"x": x_of(1, device)}
    with pytest.raises(DeviceError, match=r"a run of 2 steps .*failed on the device: kernel 'axpy', line"):
        executor.run(x, weights)
    with pytest.raises(DeviceError, match="step 'inner' failed on the device: kernel 'axpy', line"):
        executor.run_timed(x, weights)


class Counting:
    """Passes every call on to a Metal object, counts calls by name, and wraps what makes further Metal objects."""

    def __init__(self, inner: Any, calls: Counter[str]) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in ("newCommandQueue", "commandBuffer", "computeCommandEncoder"):
            return attribute

        def call() -> Counting:
            self._calls[name] += 1
            return Counting(attribute(), self._calls)

        return call


def test_a_run_is_one_command_buffer_with_one_encoder() -> None:
    api, calls = software_metal(), Counter[str]()
    device = Device(MetalBackend(replace(api, device=Counting(api.device, calls))))
    weights = load_weights({"layer.weight": W}, axpy_program(), device)
    executor = Executor(axpy_program(), device)
    assert calls == {"newCommandQueue": 1}
    executor.run({"x": x_of(1, device)}, weights)
    assert calls == {"newCommandQueue": 1, "commandBuffer": 1, "computeCommandEncoder": 1}
    executor.run_timed({"x": x_of(1, device)}, weights)
    assert calls == {"newCommandQueue": 1, "commandBuffer": 3, "computeCommandEncoder": 3}


def test_an_executor_works_after_a_failure(device: Device, executor: Executor, weights: Weights) -> None:
    failing = Executor(changed_step(args=(Argument(2, 512), Argument(0, 0), Argument(3, 0))), device)
    for _ in range(2):
        with pytest.raises(DeviceError):
            failing.run({"x": x_of(1, device)}, weights)
    result = executor.run({"x": x_of(0.5, device)}, weights)["out"]
    np.testing.assert_allclose(result.to_numpy(), expected(0.5), atol=4e-3)
