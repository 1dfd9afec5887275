"""Layers whose weights are codes: what stands in a quantised decoder in place of its linears and embeddings.

They export as the operator ``npu_codes::dequantize`` ahead of a product, which `npu_compiler.ops.codes` defines for the
compiler; here is what PyTorch computes for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.integers import ceil_div

__all__ = ["CodedEmbedding", "CodedLinear", "CodedWeight", "as_tensor"]

_CHUNK = 1 << 21  # numbers that are made at a time


torch.library.define(
    "npu_codes::dequantize",
    "(Tensor codes, Tensor scales, Tensor? zeros, Tensor? biases, Tensor? codebook, int bits, int columns, int group, "
    "int rows, int zero, ScalarType dtype) -> Tensor",
)


@torch.library.impl("npu_codes::dequantize", "CompositeExplicitAutograd")
def _dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    biases: torch.Tensor | None,
    codebook: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """As `npu_compiler.ops.codes.dequantize`; in float64 where the scales are. It makes some rows at a time."""
    columns, rows, dtype = options[1], options[3], options[5]
    result = codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)
    if codes.ndim != 2:
        return result.copy_(_made(codes, scales, zeros, biases, codebook, *options))
    step = max(1, _CHUNK // (rows * columns)) * rows  # whole blocks
    for start in range(0, codes.shape[0], step):
        part, groups = slice(start, start + step), slice(start // rows, (start + step) // rows)
        others = [None if other is None else other[groups] for other in (scales, zeros, biases)]
        result[part] = _made(codes[part], *others, codebook, *options)
    return result


def _made(
    codes: torch.Tensor,
    scales: Any,
    zeros: torch.Tensor | None,
    biases: torch.Tensor | None,
    codebook: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """The numbers of codes, in float32 or in the scales' float64."""
    bits, columns, group, rows, zero, _ = options
    exact = torch.promote_types(scales.dtype, torch.float32)
    height = codes.shape[-2] if codes.ndim > 1 else 1

    def over_groups(tensor: torch.Tensor) -> torch.Tensor:
        if rows > 1:
            tensor = tensor.repeat_interleave(rows, -2)[..., :height, :]
        tensor = tensor.to(exact)
        return tensor if tensor.shape[-1] == 1 else tensor.repeat_interleave(group, -1)[..., :columns]

    numbers = _numbers(codes, bits, columns)
    made = numbers.to(exact) if codebook is None else codebook.to(exact)[numbers.int()]
    if zeros is not None:
        made -= over_groups(_numbers(zeros, bits, ceil_div(columns, group)))
    elif zero:
        made -= zero
    made *= over_groups(scales)
    if biases is not None:
        made += over_groups(biases)
    return made


def _shaped(codes: torch.Tensor, *others: Any) -> torch.Tensor:
    columns, dtype = others[5], others[-1]
    return codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)


torch.library.register_fake("npu_codes::dequantize", _shaped)
torch.library.define("npu_codes::quantize", "(Tensor input, ScalarType dtype) -> (Tensor, Tensor)")


@torch.library.impl("npu_codes::quantize", "CompositeExplicitAutograd")
def _quantize(input: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `npu_compiler.ops.row_codes.quantize`; in float64 where the input is."""
    exact = torch.promote_types(input.dtype, torch.float32)
    most = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    scales = (input.to(exact).abs().amax(-1, keepdim=True) * (1 / most)).clamp(min=1e-12)
    codes = input.to(exact) * (1 / scales)
    return (codes.round() if dtype == torch.int8 else codes.clamp(-most, most)).to(dtype), scales


def _quantized(input: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.promote_types(input.dtype, torch.float32)
    return input.new_empty(input.shape, dtype=dtype), input.new_empty((*input.shape[:-1], 1), dtype=exact)


torch.library.register_fake("npu_codes::quantize", _quantized)


def _numbers(codes: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The codes of each row, one by one."""
    if bits == 8:
        return codes
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        parts = torch.stack([(codes >> shift) & mask for shift in range(0, 8, bits)], -1)
        return parts.flatten(-2)[..., :count]
    first = torch.arange(count, device=codes.device) * bits
    byte = first >> 3
    word = codes[..., byte].to(torch.int32)
    word |= codes[..., (byte + 1).clamp(max=codes.shape[-1] - 1)].to(torch.int32) << 8
    return (word >> (first & 7)) & ((1 << bits) - 1)


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array's memory, also of the data types that numpy itself has not."""
    if array.dtype.isbuiltin != 1:  # another library made it known to numpy
        return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def _in_one_precision(tensor: torch.Tensor, model: torch.dtype) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) and tensor.dtype != model else tensor


class CodedWeight(torch.nn.Module):
    """A matrix in codes, as buffers; what its own scales and biases are made of are modules within.

    Scales of another half precision than the model's become float32, so that the model has one.
    """

    codes: torch.Tensor

    def __init__(self, coded: CodedMatrix, dtype: torch.dtype, model: torch.dtype | None = None) -> None:
        """Args:
        coded: The matrix.
        dtype: What it is made into.
        model: What the model computes in, if that is another type.
        """
        super().__init__()
        model = model or dtype
        self._dtype, self._shape, self._rows = dtype, coded.shape, coded.rows
        self._options = (coded.bits, coded.columns, coded.group)
        self._zero = coded.zero
        for name in ("codes", "scales", "zeros", "biases", "codebook"):
            part = getattr(coded, name)
            if isinstance(part, CodedMatrix):
                self.add_module(name, CodedWeight(part, torch.float32, model))
            else:
                self.register_buffer(name, None if part is None else _in_one_precision(as_tensor(part), model))

    def _part(self, name: str) -> torch.Tensor | None:
        part: torch.Tensor | CodedWeight | None = getattr(self, name)
        if isinstance(part, CodedWeight):
            made: torch.Tensor = part()
            return made
        return part

    def forward(self) -> torch.Tensor:
        """The matrix, of `shape`."""
        parts = [self._part(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
        made: torch.Tensor = torch.ops.npu_codes.dequantize(*parts, *self._options, self._rows, self._zero, self._dtype)
        return made if tuple(made.shape) == self._shape else made.reshape(self._shape)

    def picked(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of the matrix, [*rows, columns]."""
        if self._rows > 1 or self.codes.shape[0] != self._shape[0]:
            return F.embedding(rows, self())
        parts = [self._picked_part(name, rows) for name in ("codes", "scales", "zeros", "biases")]
        made: torch.Tensor = torch.ops.npu_codes.dequantize(
            *parts, self.codebook, *self._options, 1, self._zero, self._dtype
        )
        return made

    def _picked_part(self, name: str, rows: torch.Tensor) -> torch.Tensor | None:
        part: torch.Tensor | CodedWeight | None = getattr(self, name)
        if isinstance(part, CodedWeight):
            return part.picked(rows)
        return None if part is None else part[rows]


def _through_codes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, scales = torch.ops.npu_codes.quantize(x, dtype)
    width = x.shape[-1]
    made: torch.Tensor = torch.ops.npu_codes.dequantize(codes, scales, None, None, None, 8, width, width, 1, 0, x.dtype)
    return made


class CodedLinear(torch.nn.Module):
    """A linear whose weight is codes; `matrix` may be shared with an embedding.

    Attributes:
        activations: The type of codes that its input is rounded to, by a scale for each row; None where it is not.
    """

    permutation: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        matrix: CodedWeight,
        permutation: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activations: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.matrix, self.activations = matrix, activations
        self.out_features, self.in_features = matrix._shape
        self.register_buffer("permutation", permutation)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.permutation is not None:
            x = torch.index_select(x, -1, self.permutation)
        if self.activations is not None:
            x = _through_codes(x, self.activations)
        return F.linear(x, self.matrix(), self.bias)


class CodedEmbedding(torch.nn.Module):
    """An embedding whose rows are codes."""

    def __init__(self, matrix: CodedWeight) -> None:
        super().__init__()
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix._shape

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.matrix.picked(tokens)
