"""What no input reaches goes along with who reads it: index arithmetic on constants never makes a partition."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from npu_cli.extras import import_torchvision
from npu_compiler import compile, extract, partition
from npu_compiler.partitioner import PartitionPlan
from npu_runtime import DAGExecutor, Device
from npu_runtime.host_tensors import to_numpy
from tests.partition.mixed import check_equal, check_mixed, sides
from tests.support.extraction import Function

TARGET = "metal"  # what lowers is much the same on all


def planned(function: Any, *inputs: torch.Tensor, **options: Any) -> PartitionPlan:
    return partition(extract(Function(function), inputs).ir, **{"target": TARGET, **options})


def _positions(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])[None].repeat(3, 1)
    places[1:, ::2] += 4
    return places


def test_positions_are_computed_where_they_are_read() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.i0((x.t() @ x)[_positions(x)].tanh())

    plan = planned(function, torch.randn(16, 16))
    assert sides(plan) == ["npu", "cpu"]
    assert [part.nodes for part in plan.partitions if not part.on_device] == [("i0",)]


def test_the_cpu_has_them_too(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        offsets = _positions(x).to(torch.float32) / 32
        return (torch.i0(offsets[:, :16] * 0.9) + x[:3, :16]) @ x.t() + offsets.sum()

    plan = check_mixed(Function(function), (torch.randn(16, 16) * 0.2,), device)
    crossing = {transfer.tensor for transfer in plan.transfers}
    assert crossing <= {"i0", *(spec.name for spec in (*plan.inputs, *plan.outputs))}


def test_indices_keep_the_numbers_that_the_model_declares(device: Device) -> None:
    """4097 is no number of half precision; an index that is computed from it stays what it is."""

    def function(x: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(4)
        places[1:3] = 4097.0
        return torch.i0((x[(places - 4090).clamp(min=0).to(torch.int64)] @ x.t()).tanh() * 0.5)

    check_mixed(Function(function), (torch.randn(8, 8) * 0.2,), device, rtol=2e-2)


def test_a_callback_has_the_last_word() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x)[_positions(x)]

    plan = planned(function, torch.randn(16, 16), is_op_supported=lambda op: "matmul" in op, target=None)
    assert all("slice" not in name for part in plan.partitions if part.on_device for name in part.nodes)


def test_a_model_of_constants_alone_runs(device: Device) -> None:
    plan = planned(lambda x: torch.arange(4) * 2, torch.randn(2), target=device.target)
    (result,) = DAGExecutor(plan, device).execute({plan.inputs[0].name: np.zeros(2, np.float32)}).values()
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, [0, 2, 4, 6])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _added_column(x),
        lambda x: _changed_columns(x),
        lambda x: _masked(x),
        lambda x: torch.stack([x[:, i].clone().mul_(i) for i in range(4)], 1),
        lambda x: _filled(x),
    ],
    ids=["a column", "every other column", "a mask", "a list", "a result that is filled"],
)
def test_changes_in_place_stay_on_the_device(function: Any, device: Device) -> None:
    plan = check_mixed(Function(function), (torch.randn(6, 8),), device, target=device.target)
    assert sides(plan) == ["npu"]


def _added_column(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 0] += 1
    return y


def _changed_columns(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    y[..., ::2].mul_(y[..., 1::2])
    return y


def _masked(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.shape[0], x.shape[1])
    mask[..., :3] = -torch.inf
    return (x + mask).softmax(-1)


def _filled(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(x.shape[0], 4, x.shape[1])
    for i in range(4):
        result[:, i] = x * i
    return result


def test_a_transformer_of_shifted_windows_is_one_partition(device: Device) -> None:
    """Its relative positions, and the masks of its shifted windows, are computed from constants in each block."""
    import_torchvision()
    from torchvision.models.swin_transformer import SwinTransformer

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": [4, 4]}
    model = SwinTransformer([4, 4], num_classes=5, norm_layer=partial(nn.LayerNorm, eps=1e-5), **sizes).eval()
    x = torch.randn(1, 3, 32, 32)
    extraction = extract(model, (x,))
    plan = partition(extraction.ir, target=device.target)
    assert sides(plan) == ["npu"]
    executor = DAGExecutor(plan, device)
    executor.load_weights({name: to_numpy(tensor) for name, tensor in extraction.weights.items()})
    (result,) = executor.execute({plan.inputs[0].name: x.numpy()}).values()
    assert isinstance(result, np.ndarray)
    with torch.no_grad():
        check_equal("result", result, model(x), 2e-2)


class _Queries(nn.Module):
    """A decoder's first layer, as detectors have it: attention among queries that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(10, 32)
        self.project = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.queries.weight[None].repeat(x.shape[0], 1, 1)
        q, k, v = (layer(start).reshape(x.shape[0], 10, 2, 16).transpose(1, 2) for layer in self.project)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], 10, 32)
        return torch.i0((attended @ x.transpose(1, 2)).tanh() * 0.5)


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_what_runs_has_the_data_types_of_the_device_though_no_input_reaches_it(target: str) -> None:
    plan = partition(extract(_Queries().eval(), (torch.randn(1, 6, 32),)).ir, target=target)
    for part in plan.partitions:
        if part.on_device:
            kinds = {
                value["dtype"] for node in part.ir["nodes"] for value in node["outputs"] if "attention" in node["name"]
            }
            assert kinds <= {"float16"}
            assert compile(part.ir, target).main.calls
    assert any("attention" in name for part in plan.partitions if part.on_device for name in part.nodes)


def test_masks_that_close_whole_rows_leave_them_finite(device: Device) -> None:
    """Float32's least number is minus infinity in half precision, whose softmax would be NaN."""

    def function(scores: torch.Tensor, open_places: torch.Tensor) -> torch.Tensor:
        least = torch.finfo(torch.float32).min
        filled = scores.masked_fill(~open_places, least).softmax(-1)
        chosen = torch.where(open_places, scores, least).softmax(-1)
        added = (scores * 0.1 + (1.0 - open_places.float()) * least).softmax(-1)
        return torch.i0(filled + chosen + added)

    open_places = torch.rand(6, 16) > 0.3
    open_places[2:4] = False
    check_mixed(Function(function), (torch.randn(6, 16), open_places), device, rtol=2e-2)
