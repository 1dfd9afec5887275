"""Models whose weights are stored in codes of a byte, in the spellings that torch exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # defines the ops of quantized_decomposed
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import npu_compiler
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, Role, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, load

__all__ = ["CASES", "SIZES", "SPELLINGS", "Coded", "check", "compiled", "kernels_of", "weight_stays_codes"]

SIZES = [(1, 256, 128), (1, 30, 41), (3, 64, 96), (5, 33, 50), (70, 72, 136), (19, 30, 41)]
"""Rows, columns and depth: a vector and matrices, in whole chunks and not."""


class Coded(torch.nn.Module):
    """Weights [n, k] in codes, with a scale and a zero point for each row; in float64 it computes without rounding."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(n * k)
        self.register_buffer("codes", torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8))
        self.register_buffer("scale", (torch.rand(n, generator=random) / 64).to(dtype))
        self.register_buffer("zero", torch.randint(-30, 30, (n,), generator=random, dtype=torch.int8))

    def centred(self, x: Tensor) -> Tensor:
        return self.codes.to(x.dtype) - self.zero.to(x.dtype)[:, None]


class Scaled(Coded):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale[:, None])


class WithZeroPoints(Coded):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.centred(x) * self.scale[:, None], self.scale)


class ScaledBehind(Coded):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.codes.t().to(x.dtype) * self.scale


class StoredByColumn(Coded):
    """The codes are stored as [k, n]."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__(n, k, dtype)
        self.codes = self.codes.t().contiguous()
        self.scale = 1 / self.scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.mm(x, (self.codes.to(x.dtype) - self.zero.to(x.dtype)) / self.scale))


class Unsigned(Coded):
    """One zero point and one scale for all."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__(n, k, dtype)
        self.codes = self.codes.view(torch.uint8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.codes.to(x.dtype) - 128) * 0.0078125)


class Normed(Coded):
    """With a norm ahead and an activation behind, as in a decoder."""

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return F.silu(F.linear(normed, self.centred(x) * self.scale[:, None])) + self.scale


class Gated(Coded):
    """Even columns of the product gate the odd ones."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = F.linear(x, self.codes.to(x.dtype) * self.scale[:, None])
        return F.silu(pairs[:, ::2]) * pairs[:, 1::2] if pairs.shape[1] % 2 == 0 else pairs


class PerChannel(Coded):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return F.linear(x, self.centred(x) * self.scale[:, None])
        made = torch.ops.quantized_decomposed.dequantize_per_channel(
            self.codes, self.scale.float(), self.zero.to(torch.int64), 0, -128, 127, torch.int8, out_dtype=x.dtype
        )
        return F.linear(x, made)


class Packed(Coded):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return F.linear(x, self.codes.to(x.dtype) * self.scale[:, None])
        packed: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scale)
        return packed


class Floats(Coded):
    """Codes of 8-bit floats."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__(n, k, dtype)
        self.codes = (self.codes.float() / 16).to(torch.float8_e4m3fn)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale[:, None])


class Left(Coded):
    """The codes are the left matrix, of which one vector is multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.centred(x) * self.scale[:, None], x[:1].t())


SPELLINGS: Mapping[str, type[Coded]] = {
    kind.__name__: kind
    for kind in (
        *(Scaled, WithZeroPoints, ScaledBehind, StoredByColumn, Unsigned, Normed, Gated),
        *(PerChannel, Packed, Floats, Left),
    )
}

CASES = [("WithZeroPoints", *size) for size in SIZES]
CASES += [(name, *SIZES[(at + turn) % 6]) for at, name in enumerate(SPELLINGS) for turn in (0, 3)]
"""A spelling, and a size: one spelling in all sizes, the others in two."""


def compiled(model: Coded, rows: int, dtype: torch.dtype, target: str) -> tuple[CompiledProgram, Tensor]:
    """The program of a model, and an input [rows, k] for it."""
    depth = model.codes.shape[0 if isinstance(model, StoredByColumn) else 1]
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return npu_compiler.compile(npu_compiler.extract(model.eval(), (x,)), target=target), x


def kernels_of(plan: ExecutionPlan) -> list[str]:
    """The entries of all kernels that a plan may launch, in order."""
    calls = (call for step in plan.steps for option in options_of(step) for call in option.calls)
    return [plan.kernels[call.kernel].entry for call in calls if isinstance(call, KernelCall)]


def weight_stays_codes(plan: ExecutionPlan, codes: Tensor) -> bool:
    """Whether nothing of a plan is as large as the weight in 16 bits, and its bytes are moved once, one each."""
    (weight,) = [buffer for buffer in plan.buffers if buffer.role is Role.WEIGHT and buffer.nbytes == codes.numel()]
    others = [buffer.nbytes for buffer in plan.buffers if buffer.role in (Role.ARENA, Role.WEIGHT)]
    reading = [
        call
        for step in plan.steps
        for call in options_of(step)[0].calls
        if any(argument.buffer == plan.buffers.index(weight) for argument in call.args)
    ]
    return max(others) < 2 * codes.numel() and len(reading) == 1 and reading[0].nbytes < 2 * codes.numel()


def check(model: Coded, rows: int, dtype: torch.dtype, device: Device) -> CompiledProgram:
    """Compares a model on a device with PyTorch in float64."""
    program, x = compiled(model, rows, dtype, device.target)
    result: NDArray[Any] | Tensor | tuple[Any, ...] = load(program, model.state_dict(), device)(x)
    given = torch.as_tensor(result[0] if isinstance(result, tuple) else result).double()
    exact = {name: value if value.element_size() == 1 else value.double() for name, value in model.state_dict().items()}
    expected: Tensor = torch.func.functional_call(model, exact, (x.double(),))
    roundings = 2 if isinstance(model, Normed | Gated) else 1  # of the operand, or of nothing
    tolerance = roundings * torch.finfo(dtype).eps
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()) / 2)
    return program
