"""Layers whose weights are codes: what stands in a quantised decoder in place of its linears and embeddings.

They export as the operator ``npu_codes::dequantize`` ahead of a product, which `npu_compiler.ops.codes` defines for the
compiler, and `coded_operator` for PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import npu_compiler.frontend.coded_operator  # noqa: F401, defines npu_codes::dequantize
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix

__all__ = ["CodedEmbedding", "CodedLinear", "CodedWeight", "as_tensor"]


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array's memory, also of the data types that numpy itself has not.

    Raises:
        ExtractionError: PyTorch has no such data type.
    """
    if array.dtype.isbuiltin != 1:  # another library made it known to numpy
        kind = getattr(torch, array.dtype.name, None)
        if kind is None:
            raise ExtractionError(
                f"given {array.dtype.name}, which PyTorch {torch.__version__} has not; install 2.7 or newer"
            )
        return torch.from_numpy(array.view(f"u{array.itemsize}")).view(kind)
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

    @property
    def _has_one_scale(self) -> bool:
        """Whether all rows share one scale, and nothing else: as the scales of small floats do."""
        scales: Any = self.scales
        if isinstance(scales, CodedWeight) or scales.numel() != 1 or self.codes.shape[0] != self._shape[0]:
            return False
        return all(getattr(self, name) is None for name in ("zeros", "biases"))

    def picked(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of the matrix, [*rows, columns]."""
        if self._has_one_scale:
            codes = self.codes[rows.reshape(-1)]
            options = (*self._options, codes.shape[0], self._zero, self._dtype)
            of_all: torch.Tensor = torch.ops.npu_codes.dequantize(
                codes, self.scales, None, None, self.codebook, *options
            )
            return of_all.reshape(*rows.shape, self._shape[1])
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
