"""What a language model's cache holds of keys and values: themselves, or codes of a byte with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import npu_compiler.frontend.coded_operator  # noqa: F401, defines the operators
from npu_compiler.dtypes import FLOAT8_E4M3FN, INT8
from npu_compiler.errors import ExtractionError

__all__ = ["PlainRows", "RowForm", "RowsInCodes", "row_form"]

_CODES = {"int8": getattr(torch, INT8.name), "fp8": getattr(torch, FLOAT8_E4M3FN.name)}  # by the names of the option


class PlainRows:
    """Rows of keys or values [..., D] as they are: one tensor."""

    tensors = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and data type of each tensor that holds rows of that shape."""
        return [(shape, self.dtype)]

    def pack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a cache holds of rows."""
        return (rows,)

    def numbers(self, held: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The rows that a cache holds."""
        return held[0]

    def put(self, cache: torch.Tensor, positions: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """A tensor of a cache [1, G, L, D] with what was packed of rows [1, G, N, D] at positions [N]."""
        return torch.index_copy(cache, 2, positions, packed)


@dataclass(frozen=True)
class RowsInCodes:
    """Rows in codes with a scale each, by which the largest number of a row is the largest code: two tensors.

    The scales [..., 1] are float32, as rounding to codes makes them: half of that would save 1.6 % of the cache at a
    head size of 128, and round what every product is multiplied by once more.

    Attributes:
        codes: Data type of the codes.
        dtype: Of the numbers.
    """

    codes: torch.dtype
    dtype: torch.dtype

    tensors = 2

    def empty(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """As `PlainRows.empty`."""
        return [(shape, self.codes), ((*shape[:-1], 1), torch.float32)]

    def pack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As `PlainRows.pack`."""
        codes, scales = torch.ops.npu_codes.quantize(rows, self.codes)
        return codes, scales

    def numbers(self, held: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """As `PlainRows.numbers`."""
        codes, scales = held
        columns = codes.shape[-1]
        options: tuple[Any, ...] = (8, columns, columns, 1, 0, self.dtype)
        made: torch.Tensor = torch.ops.npu_codes.dequantize(codes, scales, None, None, None, *options)
        return made

    def put(self, cache: torch.Tensor, positions: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """As `PlainRows.put`; codes and scales by the same operation, so that their places are one expression."""
        if self.codes.is_floating_point:  # which PyTorch's index_copy does not take on the CPU
            filled: torch.Tensor = torch.ops.aten.index_put(cache, (None, None, positions), packed)
            return filled
        return torch.index_copy(cache, 2, positions, packed)


RowForm = PlainRows | RowsInCodes


def row_form(name: str | None, dtype: torch.dtype) -> RowForm:
    """The form that an option asks for.

    Args:
        name: ``int8`` or ``fp8``; ``16`` or None for `dtype`.
        dtype: What the model computes in.

    Raises:
        ExtractionError: There is no such form.
    """
    if name in (None, "16"):
        return PlainRows(dtype)
    if name not in _CODES:
        raise ExtractionError(f"given kv_cache_dtype='{name}', expected one of {', '.join((*_CODES, '16'))}")
    return RowsInCodes(_CODES[name], dtype)
