"""Mixed execution with a CUDA device: what crosses keeps its values, states stay, partitions share memory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import npu_compiler
from npu_compiler import extract, partition
from npu_runtime import DAGExecutor, Device, Generator
from npu_runtime.device_decoding import can_decode_on_device
from npu_runtime.sampling import Sampler, Sampling
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
            x = torch.tanh(layer(x).cumsum(0) / x.shape[0])
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
    """With what a callback refuses on the CPU, tokens are chosen on the host and caches stay on the device."""
    decoder = make_decoder(tmp_path_factory.mktemp("qwen"), "Qwen2", prefill=(16,))
    irs = {name: json.loads((decoder.folder / f"{name}.json").read_text()) for name in ("prefill_16", "decode")}
    refused = ("aten.silu.default", "aten.cos.default")
    plans = {
        name: npu_compiler.partition(ir, lambda node: node["op_type"] not in refused, target="cuda")
        for name, ir in irs.items()
    }
    generator = Generator(decoder.folder, device, plans=plans)
    assert not can_decode_on_device(generator.model, Sampler(Sampling()))
    check_greedy(decoder, [5, 6, 7, 8, 9], [token.id for token in generator.generate([5, 6, 7, 8, 9], 32)])
