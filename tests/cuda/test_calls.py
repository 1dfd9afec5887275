"""Runs that were prepared once: inputs from anywhere, outputs that nobody else holds, results on the host."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

import npu_compiler
from cuda_runtime import CUDAExecutor, CUDATensor
from npu_compiler.errors import InputError
from npu_runtime import Device, NPUBuffer
from tests.ops.cases import case, floats

SHAPE = (2, 8, 16, 16)


@pytest.fixture
def executor(device: Device) -> CUDAExecutor:
    """out = x0 + x1, for float16 tensors."""
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.float16)
    return CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)


def _arrays(rng: np.random.Generator, kind: type = np.float16) -> tuple[NDArray[Any], NDArray[Any]]:
    return rng.standard_normal(SHAPE).astype(kind), rng.standard_normal(SHAPE).astype(kind)


def _only(outputs: dict[str, Any]) -> Any:
    (output,) = outputs.values()
    return output


def _sum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    return (a.astype(np.float16).astype(np.float32) + b.astype(np.float16).astype(np.float32)).astype(np.float16)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_arrays_in_and_arrays_out(executor: CUDAExecutor, rng: np.random.Generator, kind: type) -> None:
    for _ in range(4):
        a, b = _arrays(rng, kind)
        output = _only(executor.compute({"x0": a, "x1": b}))
        np.testing.assert_array_equal(output, _sum(a, b))


def test_arrays_of_any_strides(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    a, b = _arrays(rng, np.float32)
    strided = np.ascontiguousarray(a.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    np.testing.assert_array_equal(_only(executor.compute({"x0": strided, "x1": b})), _sum(a, b))


def test_an_array_may_change_once_the_run_is_asked_for(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    outputs, wanted = [], []
    a, b = _arrays(rng, np.float32)
    for number in range(50):
        a[...] = number
        wanted.append(_sum(a, b))
        outputs.append(_only(executor.run({"x0": a, "x1": b}, sync=False)))
    for output, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(output.to_numpy(), expected)


def test_tensors_in_the_same_and_in_other_places(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    kept = []
    here = [torch.from_numpy(x).cuda() for x in _arrays(rng)]
    for number in range(40):
        a, b = _arrays(rng)
        given = here if number % 2 else [torch.empty_like(here[0]) for _ in range(2)]
        kept.append(given)
        for tensor, array in zip(given, (a, b), strict=True):
            tensor.copy_(torch.from_numpy(array))
        output = _only(executor.run({"x0": given[0], "x1": given[1]}, sync=number % 3 == 0))
        np.testing.assert_array_equal(output.to_numpy(), a + b)


def test_tensors_that_must_be_converted(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    a, b = (torch.from_numpy(x).cuda() for x in _arrays(rng, np.float32))
    nchw = a.contiguous(memory_format=torch.channels_last)
    for _ in range(4):
        a += 1
        nchw.copy_(a)
        for first in (a, nchw, nchw.half()):
            output = from_dlpack(_only(executor.run({"x0": first, "x1": b})))
            assert torch.equal(output, (first.half().float() + b.half().float()).half())


def test_no_output_that_somebody_holds_is_overwritten(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    b = torch.zeros(SHAPE, dtype=torch.float16, device="cuda")
    held: list[tuple[Any, int]] = []
    for number in range(60):
        a = torch.full(SHAPE, float(number), dtype=torch.float16, device="cuda")
        output: CUDATensor = _only(executor.run({"x0": a, "x1": b}, sync=False))
        how = number % 5
        if how == 0:
            held.append((output, number))
        elif how == 1:
            held.append((from_dlpack(output), number))
        elif how == 2:
            held.append((output.array[1:], number))
        elif how == 3:
            held.append((output.data, number))
    torch.cuda.synchronize()
    for what, number in held:
        if isinstance(what, CUDATensor):
            assert (what.to_numpy() == number).all()
        elif isinstance(what, torch.Tensor):
            assert bool((what == number).all())
        elif hasattr(what, "reading"):
            assert (what.reading().view(np.float16) == number).all()
        else:
            assert bool((what == number).all())


def test_outputs_that_nobody_holds_are_used_again(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    a, b = (torch.from_numpy(x).cuda() for x in _arrays(rng))
    places = {_only(executor.run({"x0": a, "x1": b})).data.pointer for _ in range(20)}
    assert len(places) == 1
    output = None
    places = set()
    for _ in range(20):
        output = _only(executor.run({"x0": a, "x1": b}))  # one is held while the next is made
        places.add(output.data.pointer)
    assert len(places) == 2


def test_outputs_may_be_given(executor: CUDAExecutor, device: Device, rng: np.random.Generator) -> None:
    a, b = _arrays(rng)
    (spec,) = executor.plan.outputs
    given = NPUBuffer.from_numpy(np.zeros(SHAPE, np.float16), device, spec)
    inputs = {"x0": torch.from_numpy(a).cuda(), "x1": torch.from_numpy(b).cuda()}
    for _ in range(3):
        output = _only(executor.run(inputs, outputs={spec.name: given}))
        assert output.data.pointer == given.data.pointer  # type: ignore[attr-defined]
        np.testing.assert_array_equal(given.to_numpy(), a + b)
    with pytest.raises(InputError, match="memory of its own"):
        executor.run({"x0": given, "x1": inputs["x1"]}, outputs={spec.name: given})
    with pytest.raises(InputError, match="expected"):
        executor.run(inputs, outputs={})


def test_numbers_beyond_float16_are_refused(executor: CUDAExecutor, device: Device, rng: np.random.Generator) -> None:
    a, b = _arrays(rng, np.float32)
    a[0, 0, 0, 0] = 1e5
    with pytest.raises(InputError, match="bfloat16"):
        executor.compute({"x0": a, "x1": b})
    with pytest.raises(InputError, match="bfloat16"):
        executor.run({"x0": torch.from_numpy(a).cuda(), "x1": b})
    a[0, 0, 0, 0] = np.inf
    assert np.isinf(_only(executor.compute({"x0": a, "x1": b}))[0, 0, 0, 0])


@pytest.mark.parametrize("shape", [(3, 5, 200, 201), (1, 3, 200, 201), (2, 1200, 600)])
def test_arrays_that_are_made_narrower_on_the_host(
    device: Device, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    """Half the bytes cross; what becomes infinite is found all the same, and infinities and NaN stay what they are."""
    ir = case("add.Tensor", floats(*shape), floats(*shape)).ir(torch.float16)
    executor = CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)
    a, b = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    b.flags.writeable = False
    for number in range(5):
        a.flat[number] = np.inf if number % 2 else np.nan
        inputs = {"x0": a, "x1": b}
        with torch.inference_mode(number % 2 == 0):
            np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(a, b))
        np.testing.assert_array_equal(_only(executor.run(inputs)).to_numpy(), _sum(a, b))
        np.testing.assert_array_equal(_only(executor.run(inputs, sync=False)).to_numpy(), _sum(a, b))
    a.flat[-1] = -65520.0  # the smallest that float16 rounds to infinity
    for run in (executor.compute, executor.run):
        with pytest.raises(InputError, match=r"up to 6\.552e\+04 in magnitude.*bfloat16"):
            run({"x0": a, "x1": b})
    a.flat[-1] = -65519.0
    np.testing.assert_array_equal(_only(executor.compute({"x0": a, "x1": b})), _sum(a, b))


def test_executors_of_siblings_share_weights_and_buffers(device: Device, rng: np.random.Generator) -> None:
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.float16)
    program = npu_compiler.compile(ir, target="cuda")
    executors = [CUDAExecutor(program, device.sibling(overlapping=4)) for _ in range(4)]
    assert len({executor.stream for executor in executors}) == 4
    a, b = _arrays(rng)
    specs = {spec.name: spec for spec in program.input_specs}
    inputs = {name: NPUBuffer.from_numpy(x, device, specs[name]) for name, x in (("x0", a), ("x1", b))}

    def work(executor: CUDAExecutor) -> None:
        for _ in range(50):
            np.testing.assert_array_equal(_only(executor.run(inputs)).to_numpy(), a + b)

    with ThreadPoolExecutor(len(executors)) as pool:
        list(pool.map(work, executors))  # raises what one of them did


def test_memory_is_flat_over_many_calls(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    a, b = _arrays(rng, np.float32)
    tensors = [torch.from_numpy(a).cuda().half() for _ in range(3)]

    def calls(count: int) -> None:
        for number in range(count):
            executor.run({"x0": tensors[number % 3], "x1": tensors[0]}, sync=False)
            executor.compute({"x0": a, "x1": b})

    calls(1000)
    gc.collect()
    pool = cupy.get_default_memory_pool()
    used, all_of_it, resident = pool.used_bytes(), pool.total_bytes(), _resident_bytes()
    calls(50_000)
    gc.collect()
    assert (pool.used_bytes(), pool.total_bytes()) == (used, all_of_it)
    assert _resident_bytes() < resident + (4 << 20)


def _resident_bytes() -> int:
    """Memory of the host that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
