"""Products of activations that are rounded to codes by weights that are codes: the model, and what it means exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import npu_compiler
import npu_compiler.frontend.coded_layers
from npu_compiler.compiled_program import CompiledProgram

__all__ = ["KINDS", "ByteProduct", "codes_of"]

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_EPS = 1e-6


def codes_of(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and the scales of their rows, as models round what they multiply."""
    codes: Tensor
    codes, scales = torch.ops.npu_codes.quantize(x, kind)
    return codes, scales


class ByteProduct(torch.nn.Module):
    """A linear of rounded inputs, with what stands around it.

    Args:
        n, k: Columns and depth.
        kind: The codes' type.
        dtype: Of inputs and results.
        norm: Whether an RMSNorm makes what is rounded.
        behind: ``""``, ``"residual"``, ``"gated"`` (even columns gate the odd ones) or ``"bias"``.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor
    gain: Tensor

    def __init__(
        self, n: int, k: int, kind: torch.dtype, dtype: torch.dtype, norm: bool = False, behind: str = ""
    ) -> None:
        super().__init__()
        self.kind, self.norm, self.behind = kind, norm, behind
        random = torch.Generator().manual_seed(n * k)
        codes, scales = codes_of((torch.randn(n, k, generator=random) + 0.1) / k**0.5, kind)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", torch.randn(n, generator=random).to(dtype))
        self.register_buffer("gain", (torch.rand(k, generator=random) + 0.5).to(dtype))

    def inputs(self, m: int) -> tuple[Tensor, Tensor]:
        """[m, k] and what a residual adds, [m, n]."""
        n, k = self.codes.shape
        random = torch.Generator().manual_seed(m)
        rows = torch.randn(m, k, generator=random) * torch.exp(torch.randn(m, 1, generator=random))
        return rows.to(self.bias.dtype), torch.randn(m, n, generator=random).to(self.bias.dtype)

    def numbers(self, x: Tensor) -> Tensor:
        """What is rounded."""
        if not self.norm:
            return x
        exact = x.float()
        return exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + _EPS) * self.gain

    def around(self, product: Tensor, residual: Tensor) -> Tensor:
        if self.behind == "residual":
            return residual + product
        if self.behind == "gated":
            return F.silu(product[:, ::2]) * product[:, 1::2]
        return product + self.bias.to(product.dtype) if self.behind == "bias" else product

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        width = x.shape[-1]
        codes, scales = codes_of(self.numbers(x), self.kind)

        def made(codes: Tensor, scales: Tensor) -> Tensor:
            numbers: Tensor = torch.ops.npu_codes.dequantize(
                codes, scales, None, None, None, 8, width, width, 1, 0, x.dtype
            )
            return numbers

        return self.around(F.linear(made(codes, scales), made(self.codes, self.scales)), residual)

    def exact(self, x: Tensor, residual: Tensor) -> Tensor:
        """The same of the same codes, without any other rounding."""
        codes, scales = codes_of(self.numbers(x), self.kind)
        product = (codes.double() @ self.codes.double().t()) * (scales.double() * self.scales.double().t())
        return self.around(product, residual.double())

    def compiled(self, m: int, target: str = "cuda") -> CompiledProgram:
        return npu_compiler.compile(npu_compiler.extract(self.eval(), self.inputs(m)), target=target)
