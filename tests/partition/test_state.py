"""State: a cache on the device that a run updates in place, and that functions share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler import extract, partition
from npu_compiler.errors import InputError
from npu_runtime import Backend, DAGExecutor, Device, MetalBackend, NPUBuffer
from npu_runtime.dag_run import DAGRun
from npu_runtime.dag_schedule import DeviceStep
from tests.partition.mixed import array, arrays_of, check_equal

SIZE = 32
SQUARE = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)) * 0.2
POSITION = torch.tensor([3, 7])


class Cache(nn.Module):
    """Writes rows into a cache on the device and reads it on both sides."""

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        updated = cache.index_copy(0, position, (x @ x)[:2])
        return torch.special.i0e(updated @ x), updated


@pytest.fixture(scope="module")
def cached(device: Device) -> DAGExecutor:
    inputs = (SQUARE, torch.zeros(16, SIZE), POSITION)
    return DAGExecutor(partition(extract(Cache().eval(), inputs).ir), device)


def cache_inputs(cache: Any) -> dict[str, Any]:
    return {"x": SQUARE.numpy(), "cache": cache, "position": POSITION.numpy()}


def test_a_cache_given_as_an_array_comes_back_as_one(cached: DAGExecutor) -> None:
    cache = np.ones((16, SIZE), np.float32)
    results = list(cached.execute(cache_inputs(cache)).values())
    expected = Cache()(SQUARE, torch.ones(16, SIZE), POSITION)
    for result, wanted in zip(results, expected, strict=True):
        check_equal("result", array(result), wanted, 5e-3)
    assert (cache == 1).all()


def test_a_cache_given_as_a_buffer_never_leaves_the_device(cached: DAGExecutor, device: Device) -> None:
    cache = NPUBuffer.from_numpy(np.ones((16, SIZE), np.float32), device, spec=cached.input_specs["cache"])
    transfers = device.backend.transfers
    uploaded, downloaded = transfers.uploads.nbytes, transfers.downloads.nbytes
    sums, updated = cached.execute(cache_inputs(cache)).values()
    assert transfers.uploads.nbytes - uploaded == SIZE * SIZE * 2 + POSITION.numel() * 8
    assert transfers.downloads.nbytes - downloaded == 16 * SIZE * 2  # what the cumulative sum reads
    assert isinstance(updated, NPUBuffer)
    assert updated.data is cache.data
    wanted_sums, wanted = Cache()(SQUARE, torch.ones(16, SIZE), POSITION)
    check_equal("sums", array(sums), wanted_sums, 5e-3)
    check_equal("cache", updated.to_numpy().astype(np.float32), wanted, 5e-3)
    again = list(cached.execute(cache_inputs(updated)).values())[1]
    assert isinstance(again, NPUBuffer)
    assert again.data is cache.data


def test_functions_share_weights_and_a_cache(device: Device) -> None:
    """Two lengths of one model, as a prefill and a decode step: one set of weights, one cache."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(SIZE, SIZE, bias=False)

        def forward(
            self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            updated = cache.index_copy(0, position, self.layer(x))
            return torch.special.i0e(self.layer(x)) @ self.layer(updated).transpose(0, 1), updated

    model = Step().eval()
    steps = {"prefill": (4, torch.arange(4)), "decode": (1, torch.tensor([4]))}
    plans, weights = {}, {}
    for name, (rows, position) in steps.items():
        extraction = extract(model, (torch.zeros(rows, SIZE), torch.zeros(16, SIZE), position))
        plans[name] = partition(extraction.ir)
        weights = arrays_of(extraction.weights)
    executor = DAGExecutor(plans, device)
    before = device.backend.transfers.uploads.nbytes
    executor.load_weights(weights)
    assert device.backend.transfers.uploads.nbytes - before == SIZE * SIZE * 2
    spec = executor.functions["decode"].input_specs["cache"]
    cache = NPUBuffer.from_numpy(np.zeros((16, SIZE), np.float32), device, spec=spec)
    wanted_cache = torch.zeros(16, SIZE)
    for name, (rows, position) in steps.items():
        x = SQUARE[:rows]
        given: dict[str, Any] = {"x": x.numpy(), "cache": cache, "position": position.numpy()}
        result, updated = executor.execute(given, function=name).values()
        with torch.no_grad():
            wanted, wanted_cache = model(x, wanted_cache, position)
        check_equal(name, array(result), wanted, 5e-3)
        assert isinstance(updated, NPUBuffer)
        assert updated.data is cache.data
    with pytest.raises(InputError, match="given the function 'train', expected one of prefill, decode"):
        executor.execute({}, function="train")


def test_an_old_state_that_is_still_read_is_kept(device: Device) -> None:
    """The cache is read by a later partition after the first has written it: the write must not reach that."""

    class Late(nn.Module):
        def forward(
            self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            updated = cache.index_copy(0, position, (x @ x)[:2])
            return torch.special.i0e(updated @ x) @ (cache.transpose(0, 1) @ cache), updated

    inputs = (SQUARE, torch.rand(16, SIZE), POSITION)
    plan = partition(extract(Late().eval(), inputs).ir)
    executor = DAGExecutor(plan, device)
    buffer = NPUBuffer.from_numpy(inputs[1].numpy(), device, spec=executor.input_specs["cache"])
    for cache in (inputs[1].numpy(), buffer):
        product, updated = executor.execute(cache_inputs(cache)).values()
        wanted_product, wanted = Late()(*inputs)
        check_equal("product", array(product), wanted_product, 1e-2)
        given = updated.to_numpy().astype(np.float32) if isinstance(updated, NPUBuffer) else updated
        check_equal("cache", given, wanted, 5e-3)


def test_a_buffer_in_two_places_at_once(cached: DAGExecutor, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NPUBuffer.from_numpy(np.ones((16, SIZE), np.float32), device, spec=cached.input_specs["cache"])
    started, go_on = Event(), Event()
    original = DAGRun.on_device

    def slow(self: DAGRun, step: DeviceStep, weights: Any) -> None:
        started.set()
        assert go_on.wait(60)
        original(self, step, weights)

    monkeypatch.setattr(DAGRun, "on_device", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cached.execute, cache_inputs(cache))
        assert started.wait(60)
        with pytest.raises(InputError, match="the buffer given for 'cache' is being updated by another run"):
            cached.execute(cache_inputs(cache))
        go_on.set()
        first.result()
    cached.execute(cache_inputs(cache))  # free again


def test_a_state_that_is_another_input_too(device: Device) -> None:
    class Pair(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.special.i0e(b), a.index_copy(0, position, (b @ b)[:2])

    inputs = (torch.zeros(SIZE, SIZE), SQUARE, POSITION)
    executor = DAGExecutor(partition(extract(Pair().eval(), inputs).ir), device)
    buffer = NPUBuffer.from_numpy(SQUARE.numpy(), device, spec=executor.input_specs["a"])
    with pytest.raises(InputError, match="input 'a' is updated in place and is the same buffer as 'b'"):
        executor.execute({"a": buffer, "b": buffer, "position": POSITION.numpy()})


def test_wrong_buffers(cached: DAGExecutor, device: Device) -> None:
    with pytest.raises(InputError, match=r"expected float16 \(16, 32\) laid out as the device wants it; make it by"):
        cached.execute(cache_inputs(NPUBuffer.zeros((16, SIZE), device, dtype="float32")))
    with pytest.raises(InputError, match="expected float16"):
        cached.execute(cache_inputs(NPUBuffer.zeros((15, SIZE), device)))
    other: Backend = MetalBackend()
    with pytest.raises(InputError, match=r"given a buffer on .*, expected one on"):
        cached.execute(cache_inputs(NPUBuffer.zeros((16, SIZE), Device(other))))
