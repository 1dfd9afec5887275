"""A model that uses a data type which tensors are only stored in, and the numbers that are hard for such a type."""

from __future__ import annotations

from pathlib import Path

import torch

import npu_compiler
from npu_compiler.dtypes import ALL, DType
from npu_runtime import Device, load

__all__ = ["CODED", "Stores", "assert_same_codes", "check_stores", "every_code", "hard_numbers", "torch_type"]

CODED = [kind for kind in ALL if kind.coding is not None]


def torch_type(kind: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, kind.name)
    return found


def every_code(kind: DType) -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).view(torch_type(kind))


def hard_numbers(kind: DType) -> torch.Tensor:
    """Random float32, the type's own numbers, halfway between them and next to that, and what is beyond.

    PyTorch before 2.13 makes NaN of what is beyond a type without infinity: then these are left out.
    """
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (20000,), generator=random).to(torch.int32).view(torch.float32)
    own = every_code(kind).float()
    own = own[own.isfinite()].unique()
    halfway = (own[1:] + own[:-1]) / 2
    near = [torch.nextafter(halfway, torch.tensor(to)) for to in (float("inf"), -float("inf"))]
    beyond = torch.tensor([*(float(own.max()) * x for x in (1.03, 1.04, 1.07, 1.2, 9)), float("inf"), float("nan")])
    numbers = torch.cat([bits, own, halfway, *near, beyond, -beyond, torch.randn(20000, generator=random)])
    return numbers[numbers.isnan() | ~numbers.to(torch_type(kind)).float().isnan()]


def assert_same_codes(given: torch.Tensor, expected: torch.Tensor) -> None:
    """Of two tensors of codes, where the sign of a NaN does not count: PyTorch's own depends on where it lies."""
    is_nan = expected.float().isnan()
    assert given.float().isnan().equal(is_nan)
    assert given.view(torch.uint8)[~is_nan].equal(expected.view(torch.uint8)[~is_nan])


class Stores(torch.nn.Module):
    """Loads, computes with and stores a type; moves what it does not compute with."""

    weight: torch.Tensor

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.bias = torch.nn.Parameter(torch.zeros(24).half())  # a half model: float32 inputs stay what they are
        own = torch.arange(256).to(torch.uint8).view(kind)
        own = own[[bool(0 <= number <= 256 and not 0 < number < 2**-9) for number in own.float()]]
        self.register_buffer("weight", own.repeat(960 // len(own) + 1)[:960].reshape(24, 40))

    def forward(self, x: torch.Tensor, hard: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.weight.to(x.dtype)
        moved = torch.cat([codes, codes.t()], 1)
        rows = torch.nn.functional.embedding(torch.tensor([1, 3]), self.weight)
        return x @ weight.t() + self.bias, hard.to(self.kind), codes.to(torch.float32), moved, rows


def check_stores(kind: DType, device: Device, folder: Path) -> None:
    """Compares what a model of the type gives, from a weight file in `folder`, with PyTorch; codes bit by bit."""
    module = Stores(torch_type(kind)).eval()
    inputs = torch.rand(3, 40).half(), hard_numbers(kind), every_code(kind).reshape(16, 16)
    npu_compiler.extract(module, inputs, folder / "m.json")
    program = npu_compiler.compile(folder / "m.json", target=device.target)
    model = load(program, folder / "m.safetensors", device)
    product, *results = model(*inputs)
    others = module(*inputs)[1:]
    exact = inputs[0].double() @ module.weight.double().t()
    torch.testing.assert_close(product.double(), exact, rtol=2e-3, atol=1e-3 * float(exact.abs().max()))
    assert [(r.dtype, r.shape) for r in results] == [(o.dtype, o.shape) for o in others]
    for result, other in zip(results, others, strict=True):
        if result.dtype == torch.float32:
            torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert_same_codes(result, other.contiguous())
