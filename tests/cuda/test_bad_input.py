"""What users and machines get wrong, as clear errors: with a CuPy that only pretends where there is no GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

import npu_compiler
from cuda_runtime import CUDABackend, CUDAExecutor, cupy_api, driver
from cuda_runtime.calls import Calls
from cuda_runtime.device import CUDABuffer
from npu_compiler.artifact.plan import KernelCall, KernelSource
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import FLOAT16
from npu_compiler.errors import DeviceError, InputError, KernelCompileError, NPUError, OutOfMemoryError
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import Device, NPUBuffer
from tests.ops.cases import case, floats


class _RuntimeFailure(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _PoolFailure(MemoryError):
    pass


class _Context:
    """A device or a stream."""

    ptr = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _pretended(driver: int = 12040, count: int = 1, capability: tuple[int, int] = (9, 0)) -> Any:
    """As much of CuPy as opening a device and allocating take, on a device whose memory is full."""

    def get_device_count() -> int:
        if not count:
            raise _RuntimeFailure(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
        return count

    def empty(*_: object) -> None:
        raise _PoolFailure

    major, minor = capability
    runtime = SimpleNamespace(
        CUDARuntimeError=_RuntimeFailure,
        driverGetVersion=lambda: driver,
        getDeviceCount=get_device_count,
        getDeviceProperties=lambda _: {"name": b"Pretended", "major": major, "minor": minor},
        memGetInfo=lambda: (1 << 30, 1 << 34),
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        memory=SimpleNamespace(OutOfMemoryError=_PoolFailure),
        Device=lambda _: _Context(),
        Stream=lambda **_: _Context(),
    )
    pool = SimpleNamespace(free_bytes=lambda: 1 << 29)
    return SimpleNamespace(cuda=cuda, empty=empty, uint8=np.uint8, get_default_memory_pool=lambda: pool)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(**options: Any) -> None:
        module = _pretended(**options)
        monkeypatch.setattr(cupy_api, "cupy", lambda: module)
        monkeypatch.setattr("cuda_runtime.device.cupy", lambda: module)
        monkeypatch.setattr("cuda_runtime.staging.cupy", lambda: module)

    return install


@pytest.mark.parametrize(
    ("options", "ordinal", "message"),
    [
        ({"count": 0}, 0, "no NVIDIA GPU that works .*no CUDA-capable device"),
        ({"driver": 11080}, 0, r"the NVIDIA driver knows CUDA 11\.8, expected 12\.0 or newer; update it"),
        ({"capability": (6, 1)}, 0, r"Pretended has compute capability 6\.1, expected 7\.0 or higher"),
        ({"count": 2}, 2, "given the device 'cuda:2', this machine has 2"),
    ],
)
def test_devices_that_do_not_do(pretend: Any, options: dict[str, Any], ordinal: int, message: str) -> None:
    pretend(**options)
    with pytest.raises(DeviceError, match=message):
        CUDABackend(ordinal)


def test_too_little_memory_says_needed_free_and_what_to_do(pretend: Any) -> None:
    pretend()
    device = CUDABackend()
    expected = r"Pretended has 1\.5 GiB of 16\.0 GiB free, a buffer of 3\.0 GiB is needed: use a smaller batch"
    with pytest.raises(OutOfMemoryError, match=expected):
        device.allocate(3 << 30)
    with pytest.raises(OutOfMemoryError, match=expected):
        device.allocate_all([1 << 30, 2 << 30])


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (2, OutOfMemoryError, "free, more is needed: use a smaller batch"),
        (719, DeviceError, "Pretended reports launch failed; see `npu doctor`"),
    ],
)
def test_what_cuda_reports_is_one_of_ours(pretend: Any, status: int, kind: type[NPUError], message: str) -> None:
    pretend()
    device = CUDABackend()
    with pytest.raises(kind, match=message), device.active():
        raise _RuntimeFailure(status, "launch failed")


def _addition(shape: tuple[int, ...] = (64,)) -> CompiledProgram:
    return npu_compiler.compile(case("add.Tensor", floats(*shape), floats(*shape)).ir(torch.float16), target="cuda")


def _adds(device: Device) -> bool:
    """Whether a program still runs as it should."""
    program = _addition()
    ones = np.ones(64, np.float16)
    inputs = {spec.name: NPUBuffer.from_numpy(ones, device, spec=spec) for spec in program.input_specs}
    (output,) = CUDAExecutor(program, device).run(inputs).values()
    return bool((output.to_numpy() == 2).all())


def test_more_than_there_is(device: Device) -> None:
    with pytest.raises(OutOfMemoryError, match=r"free, a buffer of 10\.0 TiB is needed: use a smaller batch"):
        device.backend.allocate(10 << 40)
    with pytest.raises(OutOfMemoryError, match=r"a buffer of 3\.0 TiB is needed"):
        device.backend.allocate_all([1 << 40, 2 << 40])
    assert _adds(device)


def test_a_kernel_that_does_not_compile(device: Device) -> None:
    program = _addition()
    broken = KernelSource(program.main.kernels[0].entry, program.main.kernels[0].text + "\nint broken = nowhere;")
    functions = {"main": replace(program.main, kernels=(broken,))}
    with pytest.raises(KernelCompileError, match=rf"the kernel '{broken.entry}' (.|\n)*nowhere"):
        CUDAExecutor(replace(program, functions=functions), device)
    assert _adds(device)


def test_a_kernel_that_is_not_there(device: Device) -> None:
    program = _addition()
    missing = KernelSource("missing", program.main.kernels[0].text)
    with pytest.raises(DeviceError, match="'missing'"):
        CUDAExecutor(replace(program, functions={"main": replace(program.main, kernels=(missing,))}), device)
    assert _adds(device)


def test_a_launch_that_the_device_refuses_leaves_the_stream_usable(device: Device) -> None:
    program = _addition()
    (step,) = program.main.calls
    assert isinstance(step, KernelCall)
    greedy = replace(step, shared_bytes=1 << 19)
    with pytest.raises(DeviceError, match="shared memory"):
        CUDAExecutor(replace(program, functions={"main": replace(program.main, steps=(greedy,))}), device)
    crowded = replace(program, functions={"main": replace(program.main, steps=(replace(step, block=(1024, 2, 1)),))})
    executor = CUDAExecutor(crowded, device)
    inputs = {
        spec.name: NPUBuffer.from_numpy(np.ones(64, np.float16), device, spec=spec) for spec in program.input_specs
    }
    with pytest.raises(DeviceError, match="CUDA refused launching"):
        executor.run(inputs)
    assert _adds(device)


def test_inputs_of_other_devices(device: Device) -> None:
    program = _addition()
    executor = CUDAExecutor(program, device)
    here = torch.ones(64, dtype=torch.float16, device="cuda")
    host = torch.ones(64, dtype=torch.float16)
    other = Device(CUDABackend())  # the same GPU, opened again
    elsewhere = NPUBuffer.from_numpy(np.ones(64, np.float16), other, spec=program.input_specs[1])
    (output,) = executor.run({"x0": here, "x1": elsewhere}).values()
    assert (output.to_numpy() == 2).all()
    (output,) = executor.run({"x0": here, "x1": host}).values()
    assert bool((from_dlpack(output) == 2).all())
    assert _adds(device)


def test_a_second_thread_is_refused_and_the_first_goes_on(device: Device) -> None:
    executor = CUDAExecutor(_addition((1 << 22,)), device)
    tensor = torch.ones(1 << 22, dtype=torch.float16, device="cuda")
    refused: list[str] = []
    done: list[bool] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        for _ in range(50):
            try:
                (output,) = executor.run({"x0": tensor, "x1": tensor}).values()
                done.append(bool((from_dlpack(output) == 2).all()))
            except DeviceError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done
    assert all(done)
    assert all("executor of its own" in text for text in refused)


def test_a_kernel_that_takes_more_than_its_launch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads what the kernel declares: of a file's own kernel, behind the end of what was given."""
    seen: list[list[bytes]] = []

    def launch(config: Any, function: Any, places: Any, extra: Any) -> int:
        seen.append([ctypes.string_at(places[number], 4096) for number in (0, 1, 2, 3, 1000, 4000)])
        return 0

    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    kernel = driver.Kernel(SimpleNamespace(), ctypes.c_void_p(), "k")  # type: ignore[arg-type]

    def run(values: list[int | bytes], params: bytes) -> None:
        kernel.launch((1, 1, 1), (1, 1, 1), (1, 1, 1), 0, values, params, 0, False)

    run([1, 2, 3, 4], bytes(range(44)))
    run([1 << 40, b"\1" * 128], b"\2" * 5)
    address, tensor_map, params, *others = seen[-1]
    assert int.from_bytes(address[:8], "little") == 1 << 40
    assert tensor_map[:128] == b"\1" * 128
    assert params == b"\2" * 5 + bytes(4091)
    assert all(other == bytes(4096) for other in others)
    with pytest.raises(DeviceError, match="'k' is given 80000 bytes of parameters"):
        run([0] * 5000, b"")


def test_a_state_that_shares_memory_with_another_input() -> None:
    """What is read would change while it is read."""
    spec = BufferSpec("", FLOAT16, FLOAT16, dense((8,)))

    def tensor(address: int) -> NPUBuffer:
        memory = SimpleNamespace(nbytes=16, data=SimpleNamespace(ptr=address))
        owner: Any = SimpleNamespace(ordinal=0, stream=SimpleNamespace(ptr=0))
        return NPUBuffer(owner, CUDABuffer(owner, memory), spec)

    calls: Any = SimpleNamespace(_specs={"cache": spec, "x": spec}, states=[(0, "cache")])
    Calls._check_states(calls, [tensor(64), tensor(80)])
    for other in (64, 56, 72):
        with pytest.raises(InputError, match="'cache' is updated in place and shares memory with 'x'"):
            Calls._check_states(calls, [tensor(64), tensor(other)])
