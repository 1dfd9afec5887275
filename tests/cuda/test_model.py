"""`npu_runtime.load` and `torch.compile(backend=...)` with tensors on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import npu_compiler
import npu_runtime
from npu_model.torch_backend import npu
from npu_runtime import Device


@pytest.mark.parametrize("mixed", [False, True])
def test_results_lie_where_the_inputs_do(mixed: bool, device: Device) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = (x @ x).relu()
            return {"y": y, "z": torch.special.i1e(y) if mixed else y + 1}

    x = torch.rand(64, 64) / 8
    extraction = npu_compiler.extract(Net().eval(), x)
    source = extraction if mixed else npu_compiler.compile(extraction.ir, target="cuda")
    model = npu_runtime.load(source, device=device)
    wanted = Net()(x)
    on_gpu = model(x.cuda())
    for name, value in on_gpu.items():
        assert value.device.type == "cuda"
        torch.testing.assert_close(value.cpu(), wanted[name], rtol=2e-2, atol=2e-2)
    assert isinstance(model(x.numpy())["y"], np.ndarray)
    cupy = pytest.importorskip("cupy")
    assert isinstance(model(cupy.asarray(x.numpy()))["y"], cupy.ndarray)


def test_a_compiled_module_reads_tensors_where_they_lie(device: Device) -> None:
    linear = torch.nn.Linear(64, 64)
    module = torch.nn.Sequential(linear, torch.nn.ReLU()).eval().half().cuda()
    fast = torch.compile(module, backend=npu)
    x = torch.randn(8, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), module(x), rtol=2e-2, atol=2e-2)
            linear.weight.mul_(2)
