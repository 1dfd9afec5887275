"""Indices beyond their tensor in mixed plans: an `InputError`, whichever side met them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler import extract, partition
from npu_compiler.errors import InputError
from npu_runtime import DAGExecutor, Device

HOSTILE = (10, -1, 10**8, 2**31, 2**32 + 3, -(2**63), 2**63 - 1)


class Embedding(nn.Module):
    """An embedding and a linear layer on the device, and sums of that on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(10, 32), nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.special.i0e(self.layer(self.table(ids)))
        return result


def loaded(device: Device, all_on_cpu: bool = False) -> DAGExecutor:
    model = Embedding().eval()
    ir = extract(model, (torch.zeros(2, 3, dtype=torch.int64),)).ir
    executor = DAGExecutor(partition(ir, (lambda _: False) if all_on_cpu else None), device)
    executor.load_weights({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    return executor


@pytest.mark.parametrize("index", HOSTILE)
def test_on_the_device(index: int, device: Device) -> None:
    executor = loaded(device)
    ids = np.array([[0, 1, 2], [3, index, 9]])
    with pytest.raises(InputError, match=rf"'ids': given the index {index} at position \[1, 1\], expected 0 to 9"):
        executor.execute({"ids": ids})
    ids[1, 1] = 4
    (result,) = executor.execute({"ids": ids}).values()
    expected = Embedding()(torch.from_numpy(ids)).detach().numpy()
    np.testing.assert_allclose(np.asarray(result), expected, atol=0.02)


@pytest.mark.parametrize("index", HOSTILE)
def test_on_the_cpu(index: int, device: Device) -> None:
    executor = loaded(device, all_on_cpu=True)
    with pytest.raises(InputError, match="index out of range"):
        executor.execute({"ids": np.array([[0, 1, 2], [3, index, 9]])})
