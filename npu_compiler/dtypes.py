"""The one table of data types: names, sizes, numpy types, kernel-language names, promotion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from npu_compiler.errors import IRError
from npu_compiler.tensor.interning import Interned

__all__ = ["DType", "dtype", "promote", "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FLOAT16", "BFLOAT16"]
__all__ += ["FLOAT32", "FLOAT64", "ALL"]


@dataclass(frozen=True, slots=True, eq=False)
class DType(Interned):
    """A data type.

    Attributes:
        name: Name in PyTorch and in the IR, such as ``bfloat16``.
        size: Bytes an element takes.
        category: 0 boolean, 1 integer, 2 floating point: the order of PyTorch's type promotion.
        rank: Position inside the category; a higher rank holds at least the range of a lower one.
        safetensors: Name in a safetensors header.
    """

    name: str
    size: int
    category: int
    rank: int
    safetensors: str

    @property
    def is_float(self) -> bool:
        return self.category == 2

    @property
    def is_integer(self) -> bool:
        return self.category == 1

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return _numpy(self.name)

    def __str__(self) -> str:
        return self.name


@cache
def _numpy(name: str) -> np.dtype[np.generic]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


BOOL = DType("bool", 1, 0, 0, "BOOL")
UINT8 = DType("uint8", 1, 1, 0, "U8")
INT8 = DType("int8", 1, 1, 0, "I8")
INT16 = DType("int16", 2, 1, 1, "I16")
INT32 = DType("int32", 4, 1, 2, "I32")
INT64 = DType("int64", 8, 1, 3, "I64")
FLOAT16 = DType("float16", 2, 2, 0, "F16")
BFLOAT16 = DType("bfloat16", 2, 2, 0, "BF16")
FLOAT32 = DType("float32", 4, 2, 1, "F32")
FLOAT64 = DType("float64", 8, 2, 2, "F64")

ALL = (BOOL, UINT8, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
_BY_NAME = {d.name: d for d in ALL}
_BY_NUMPY = {d.numpy: d for d in ALL}
_TORCH_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}


def dtype(value: object) -> DType:
    """Finds a data type by name (``float16``, ``torch.float16``), numpy dtype or itself.

    Raises:
        IRError: No such data type.
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = _BY_NAME.get(_TORCH_ALIASES.get(name, name))
    else:
        try:
            # numpy takes None for float64
            found = None if value is None else _BY_NUMPY.get(np.dtype(value))  # type: ignore[call-overload]
        except TypeError:
            found = None
    if found is None:
        raise IRError(f"unknown data type {value!r}; expected one of {', '.join(_BY_NAME)}")
    return found


def promote(a: DType, b: DType) -> DType:
    """The data type of a binary op on tensors of dtypes `a` and `b`, by PyTorch's rules."""
    if a == b:
        return a
    if a.category != b.category:
        return a if a.category > b.category else b
    if {a, b} == {FLOAT16, BFLOAT16}:
        return FLOAT32
    if {a, b} == {UINT8, INT8}:
        return INT16
    return a if a.rank > b.rank else b
