"""Models in which the device cannot do everything compute what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from npu_runtime import Device
from tests.partition.mixed import check_mixed, sides
from tests.support.extraction import Function

Build = Callable[[], nn.Module]


class Chain(nn.Module):
    """Linear layers and functions in a row."""

    def __init__(self, *stages: int | Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = stages
        self.layers = nn.ModuleList(nn.Linear(32, size) for size in stages if isinstance(size, int))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = iter(self.layers)
        for stage in self.stages:
            x = next(layers)(x) if isinstance(stage, int) else stage(x)
        return x


def unsupported(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.special.i0e(x) / 8
    return result


def another(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.special.i1e(x)
    return result


CHAINS = {
    "first": (Chain(unsupported, 32, torch.relu, 32), ["cpu", "npu"]),
    "last": (Chain(32, torch.relu, 32, unsupported), ["npu", "cpu"]),
    "middle": (Chain(32, unsupported, 32, torch.tanh), ["npu", "cpu", "npu"]),
    "twice": (Chain(32, unsupported, 32, torch.relu, another, 32), ["npu", "cpu", "npu", "cpu", "npu"]),
    "twice in a row": (Chain(32, unsupported, another, 32), ["npu", "cpu", "npu"]),
    "everywhere": (Chain(unsupported, another, unsupported), ["cpu"]),
    "between all": (
        Chain(unsupported, 32, another, 32, unsupported, 32, another),
        ["cpu", "npu", "cpu", "npu", "cpu", "npu", "cpu"],
    ),
    "nowhere": (Chain(32, torch.relu, 32), ["npu"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, device: Device) -> None:
    model, expected = CHAINS[name]
    torch.manual_seed(1)
    plan = check_mixed(model, (torch.randn(24, 32),), device)
    assert sides(plan) == expected


class Branches(nn.Module):
    """A tensor that both sides read, several times, and that is an output too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shared = torch.relu(self.first(x))
        left = torch.special.i0e(shared) / 16
        right = self.second(shared) * 0.5
        order = torch.nonzero_static(mask, size=4)
        joined = self.third(left + right) + shared
        return joined, torch.where(mask, joined, left), order, shared


def test_branches_that_meet_again(device: Device) -> None:
    torch.manual_seed(1)
    plan = check_mixed(Branches(), (torch.randn(24, 32), torch.rand(24, 32) > 0.5), device)
    assert sides(plan) == ["npu", "cpu", "npu"]


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Conv2d(8, 4, 3, padding=1)
        assert self.norm.running_mean is not None
        nn.init.normal_(self.norm.running_mean, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.special.i0e(x)
        return torch.tanh(self.out(x))


def test_images_cross_with_their_padding_removed(device: Device) -> None:
    plan = check_mixed(Normalized(), (torch.randn(2, 3, 12, 10),), device)
    assert sides(plan) == ["npu", "cpu", "npu"]
    assert "bn" not in plan.report()


def test_two_programs_may_lay_out_one_tensor_differently(device: Device) -> None:
    """The first reads it as rows, the second as an image."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.conv = nn.Linear(16, 16), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.special.i0e(self.linear(x)) / 8
            return torch.add(self.conv(rows + x), self.linear(rows))

    check_mixed(Two(), (torch.randn(1, 4, 16, 16),), device)


def test_bfloat16_models_stay_bfloat16(device: Device) -> None:
    plan = check_mixed(
        CHAINS["twice"][0].to(torch.bfloat16), (torch.randn(24, 32, dtype=torch.bfloat16),), device, 0.04
    )
    CHAINS["twice"][0].to(torch.float32)
    for part in plan.partitions:
        assert {tensor["dtype"] for tensor in part.ir["graph_inputs"]} == {"bfloat16"}


def test_float16_models_stay_float16(device: Device) -> None:
    model = Function(lambda x: torch.special.i0e(torch.relu(x @ x) * 0.01) + x)
    check_mixed(model, (torch.randn(16, 16, dtype=torch.float16),), device)


def test_outputs_that_are_inputs_weights_or_the_same_tensor(device: Device) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.special.i0e(x * self.scale)
            return x, self.scale, y, y.view(-1)

    check_mixed(Same(), (torch.randn(4, 16),), device)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], device: Device) -> None:
    model = Function(lambda x: (torch.erfinv(x * 0.25).relu() * 2 + x, torch.frexp(x.reshape(-1)).exponent))
    check_mixed(model, (torch.rand(shape),), device)


def test_results_that_nobody_reads(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.special.i0e(x)
        x @ x @ x
        result: torch.Tensor = torch.special.i0e(x @ x)
        return result

    check_mixed(Function(function), (torch.randn(16, 16),), device)


def test_a_model_without_nodes(device: Device) -> None:
    check_mixed(Function(lambda x: x), (torch.randn(3),), device)
