"""Mixed execution with a CUDA device: what crosses keeps its values, states stay, partitions share memory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import npu_compiler
import npu_runtime
from npu_compiler import extract, partition
from npu_compiler.errors import InputError
from npu_model.torch_backend import npu
from npu_runtime import DAGExecutor, Device, Generator
from npu_runtime.backend import Traffic
from tests.partition.mixed import array, arrays_of, check_equal, check_mixed, sides
from tests.support.decoders import check_greedy, make_decoder

WIDTH = 256


class Layers(nn.Module):
    """Linear layers on the device, and a cumulative sum, which only the CPU has, between each two."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.special.i0e(layer(x)) / x.shape[0])
        return x


def _input(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("rows", "dtype", "rtol"),
    [(16, torch.float32, 5e-3), (16, torch.bfloat16, 5e-2), (1 << 14, torch.float32, 5e-3)],
    ids=["small", "bfloat16", "larger than a piece of pinned memory"],
)
def test_what_crosses_keeps_its_values(device: Device, rows: int, dtype: torch.dtype, rtol: float) -> None:
    plan = check_mixed(Layers(3, dtype), (_input(rows, dtype),), device, rtol, target="cuda")
    assert sides(plan).count("cpu") == 3


class Residual(nn.Module):
    """A cumulative sum on the CPU between two products on the device, of which the second reads `x` once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.special.i0e(x @ x) / x.shape[0] @ x
        return result


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of PyTorch's tensors that are copied to the host."""
    shapes: list[torch.Size] = []
    original = torch.Tensor.cpu

    def cpu(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.is_cuda:
            shapes.append(self.shape)
        return original(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return shapes


def test_tensors_on_the_device_do_not_pass_through_the_host(device: Device, fetched: list[torch.Size]) -> None:
    x = (torch.rand(64, 64) / 8).half()
    plan = partition(extract(Residual().eval(), (x,)).ir, target="cuda")
    assert sides(plan) == ["npu", "cpu", "npu"]
    model, there = npu_runtime.load(plan, device=device), x.cuda()
    for _ in range(3):  # what was captured before is not to copy either
        uploads, downloads = (replace(t) for t in _traffic(device))
        result = model(there)
        up, down = (now.since(before) for now, before in zip(_traffic(device), (uploads, downloads), strict=True))
        assert up.count <= 1  # what the CPU made
        assert down.count <= 1  # what it reads
        assert max(up.nbytes, down.nbytes) <= x.nbytes
        assert not fetched
        assert result.is_cuda
        torch.testing.assert_close(result.cpu(), Residual()(x), rtol=2e-2, atol=2e-2)
        fetched.clear()
    cupy = pytest.importorskip("cupy")
    assert isinstance(model(cupy.asarray(x.numpy())), cupy.ndarray)


def test_a_compiled_module_in_partitions_copies_no_tensor(device: Device, fetched: list[torch.Size]) -> None:
    torch._dynamo.reset()
    fast = torch.compile(Residual().eval().cuda(), backend=npu)
    for scale in (1.0, 0.5):
        x = (torch.rand(64, 64, device="cuda") * scale / 8).half()
        with torch.no_grad():
            fast(x)
            fetched.clear()
            result = fast(x)
        assert not fetched
        assert result.is_cuda
        torch.testing.assert_close(result, Residual()(x), rtol=2e-2, atol=2e-2)


def test_a_tensor_given_for_a_state_is_not_updated(device: Device, fetched: list[torch.Size]) -> None:
    class Cache(nn.Module):
        def forward(
            self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            updated = cache.index_copy(0, position, (x @ x)[:2])
            return torch.special.i0e(updated @ x), updated

    inputs = ((torch.rand(64, 64) / 8).half(), torch.zeros(16, 64).half(), torch.tensor([3, 7]))
    model = npu_runtime.load(partition(extract(Cache().eval(), inputs).ir, target="cuda"), device=device)
    given = [tensor.cuda() for tensor in inputs]
    sums, updated = model(*given)
    assert torch.Size((16, 64)) not in fetched
    for result, wanted in zip((sums, updated), Cache()(*inputs), strict=True):
        torch.testing.assert_close(result.cpu(), wanted, rtol=2e-2, atol=2e-2)
    assert not given[1].any()


def test_an_input_too_large_for_the_device_is_told(device: Device) -> None:
    x = torch.full((64, 64), 1e6)
    executor = DAGExecutor(partition(extract(Residual().eval(), (x,)).ir, target="cuda"), device)
    for given in (x.numpy(), x.cuda()):
        with pytest.raises(InputError, match="float16"):
            executor.execute({"x": given})


def _traffic(device: Device) -> tuple[Traffic, Traffic]:
    return device.backend.transfers.uploads, device.backend.transfers.downloads


def test_runs_in_threads(device: Device) -> None:
    model, x = Layers(2, torch.float32).eval(), _input(64, torch.float32)
    extraction = extract(model, (x,))
    executor = DAGExecutor(partition(extraction.ir, target="cuda"), device)
    executor.load_weights(arrays_of(extraction.weights))
    with torch.no_grad():
        expected = [model(x * factor) for factor in range(8)]
    with ThreadPoolExecutor(8) as workers:
        results = list(workers.map(lambda factor: executor.execute({"x": (x * factor).numpy()}), range(8)))
    for result, wanted in zip(results, expected, strict=True):
        check_equal("result", array(next(iter(result.values()))), wanted, 5e-3)


def test_generation_through_partitions(device: Device, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With what a callback refuses on the CPU, caches stay on the device."""
    decoder = make_decoder(tmp_path_factory.mktemp("qwen"), "Qwen2", prefill=(16,))
    irs = {name: json.loads((decoder.folder / f"{name}.json").read_text()) for name in ("prefill_16", "decode")}
    refused = ("aten.silu.default", "aten.cos.default")
    plans = {
        name: npu_compiler.partition(ir, lambda node: node["op_type"] not in refused, target="cuda")
        for name, ir in irs.items()
    }
    generator = Generator(decoder.folder, device, plans=plans)
    assert not generator.model.updates_in_place
    check_greedy(decoder, [5, 6, 7, 8, 9], [token.id for token in generator.generate([5, 6, 7, 8, 9], 32)])
