"""Tensors on a device are read where they lie: what crosses is counted, and nothing else may."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_runtime
from metal_runtime.backend import MetalBackend
from metal_runtime.metal_api import software_metal
from npu_compiler import extract, partition
from npu_compiler.errors import InputError
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime import DAGExecutor, Device, Executor, NPUBuffer
from tests.partition.mixed import array, check_equal, sides
from tests.support.extraction import Function

SIZE = 32
X = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)) * 0.2
POSITION = torch.tensor([3, 7])


class Library:
    """What tensors of the device's library are made by."""

    @staticmethod
    def from_dlpack(tensor: Any) -> DeviceTensor:
        return DeviceTensor(tensor)

    @staticmethod
    def asarray(given: Any, copy: bool | None = None) -> DeviceTensor:
        """Of an array of the host, or of a tensor, which is then copied on the device."""
        if isinstance(given, DeviceTensor):
            assert copy
            other = NPUBuffer.zeros(given.shape, given.buffer.device)
            with other.data.writing() as memory:
                memory[:] = given.buffer.data.reading()
            return DeviceTensor(other)
        return DeviceTensor(given)


class DeviceTensor:
    """Another library's tensor in the device's memory; it knows how often it was read into the host's.

    Attributes:
        buffer: What it is; an array, where the host made it.
        fetched: How often.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.fetched = buffer, 0
        self.shape, self.dtype = tuple(buffer.shape), buffer.dtype

    def __array_namespace__(self) -> type[Library]:
        return Library

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("its memory is not asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self.fetched += 1
        values = self.buffer.to_numpy() if isinstance(self.buffer, NPUBuffer) else self.buffer
        return np.asarray(values, dtype)


class SharedBuffer(NPUBuffer):
    """A buffer whose memory the library can take."""

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("its memory is not asked for")


class TakingExecutor(Executor):
    """Takes the library's tensors where they lie, as that of a GPU does."""

    def _adopted(self, name: str, value: Any) -> NPUBuffer:
        if isinstance(value, DeviceTensor):
            adopted: NPUBuffer = value.buffer
            return adopted
        return super()._adopted(name, value)

    def _output(self, spec: BufferSpec, inputs: Any) -> NPUBuffer:
        made = super()._output(spec, inputs)
        return SharedBuffer(made.device, made.data, made.spec)


class TakingBackend(MetalBackend):
    executor_class = (__name__, "TakingExecutor")


@pytest.fixture
def taking() -> Device:
    return Device(TakingBackend(software_metal()))


def there(values: torch.Tensor, device: Device, kind: str = "float16") -> DeviceTensor:
    buffer = NPUBuffer.from_numpy(values.numpy(), device, dtype=kind)
    return DeviceTensor(buffer)


def counts(device: Device) -> tuple[int, int]:
    transfers = device.backend.transfers
    return transfers.uploads.count, transfers.downloads.count


def crossed(device: Device, before: tuple[int, int]) -> tuple[int, int]:
    """Uploads and downloads since."""
    now = counts(device)
    return now[0] - before[0], now[1] - before[1]


def three_parts(x: torch.Tensor) -> torch.Tensor:
    """On the device, the CPU, and the device again, which reads `x` once more."""
    result: torch.Tensor = torch.special.i0e(x @ x) / SIZE @ x
    return result


def plan_of(function: Any, *inputs: torch.Tensor) -> PartitionPlan:
    return partition(extract(Function(function), inputs).ir)


def test_a_tensor_on_the_device_is_read_where_it_lies(taking: Device) -> None:
    plan = plan_of(three_parts, X)
    assert sides(plan) == ["npu", "cpu", "npu"]
    executor, x = DAGExecutor(plan, taking), there(X, taking)
    for _ in range(2):
        before = counts(taking)
        (result,) = executor.execute({plan.inputs[0].name: x}, on_device=True).values()
        assert crossed(taking, before) == (1, 1)  # what the CPU reads, and what it made
        assert x.fetched == 0
        assert isinstance(result, NPUBuffer)
        check_equal("result", result.to_numpy().astype(np.float32), three_parts(X), 1e-2)
    (result,) = executor.execute({plan.inputs[0].name: x}).values()
    check_equal("result", array(result), three_parts(X), 1e-2)


def test_a_tensor_is_copied_to_the_host_once_where_the_cpu_reads_it(taking: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.special.i0e(x @ x) + torch.special.i1e(x)
        return result

    plan, x = plan_of(function, X), there(X, taking)
    (result,) = DAGExecutor(plan, taking).execute({plan.inputs[0].name: x}).values()
    assert x.fetched == 1
    check_equal("result", array(result), function(X), 1e-2)


def test_a_model_s_results_are_where_its_inputs_were(taking: Device) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = torch.special.i0e(x @ x)
        return middle / SIZE @ x, middle

    plan, x = plan_of(function, X), there(X, taking)
    model = npu_runtime.load(plan, device=taking)
    before = counts(taking)
    product, middle = model(x)
    assert crossed(taking, before) == (1, 1)
    assert x.fetched == 0
    assert isinstance(product.buffer, SharedBuffer)
    assert isinstance(middle, DeviceTensor)
    for result, wanted in zip((product, middle), function(X), strict=True):
        check_equal("result", np.asarray(result).astype(np.float32), wanted, 1e-2)
    assert isinstance(model(X.numpy())[0], np.ndarray)
    assert isinstance(model(X)[0], torch.Tensor)


def test_results_of_buffers_alone_stay_buffers(taking: Device) -> None:
    plan = plan_of(three_parts, X)
    model = npu_runtime.load(plan, device=taking)
    result = model(NPUBuffer.from_numpy(X.numpy(), taking, dtype="float16"))
    assert isinstance(result, NPUBuffer)
    check_equal("result", result.to_numpy().astype(np.float32), three_parts(X), 1e-2)


def test_a_caller_s_tensor_is_not_updated(taking: Device) -> None:
    """The program writes rows into a cache; a tensor that is given for it stays, as an array does."""

    def function(x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        updated = cache.index_copy(0, position, (x @ x)[:2])
        return torch.special.i0e(updated @ x), updated

    inputs = (X, torch.zeros(16, SIZE), POSITION)
    plan = plan_of(function, *inputs)
    cache = there(inputs[1], taking)
    given = dict(zip((spec.name for spec in plan.inputs), (there(X, taking), cache, POSITION.numpy()), strict=True))
    for on_device in (False, True):
        sums, updated = DAGExecutor(plan, taking).execute(given, on_device=on_device).values()
        assert isinstance(updated, NPUBuffer) == on_device
        values = updated.to_numpy() if isinstance(updated, NPUBuffer) else updated
        wanted = function(*inputs)
        check_equal("sums", array(sums), wanted[0], 1e-2)
        check_equal("cache", values.astype(np.float32), wanted[1], 1e-2)
        assert not cache.buffer.to_numpy().any()
        assert cache.fetched == 0


def test_a_tensor_on_the_device_that_does_not_fit(taking: Device) -> None:
    executor = DAGExecutor(plan_of(three_parts, X), taking)
    name = executor.plan.inputs[0].name
    with pytest.raises(InputError, match=r"given the shape \(4, 32\), expected \(32, 32\)"):
        executor.execute({name: there(X[:4], taking)})
    with pytest.raises(InputError, match="given the dtype int32, expected float32"):
        executor.execute({name: there(X.int(), taking, "int32")})
