"""The one table of data types: names, sizes, numpy types, codes, promotion. Who lists data types asks this table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from npu_compiler.codings import Coding, PowerOfTwo, SmallFloat
from npu_compiler.errors import IRError
from npu_compiler.tensor.interning import Interned

__all__ = [
    "DType",
    "add",
    "converts",
    "dtype",
    "promote",
    "BOOL",
    "UINT8",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FLOAT16",
]
__all__ += ["BFLOAT16", "FLOAT32", "FLOAT64", "FLOAT8_E4M3FN", "FLOAT8_E5M2", "FLOAT8_E8M0FNU", "ALL"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DType(Interned):
    """A data type.

    Attributes:
        name: Name in PyTorch and in the IR, such as ``bfloat16``.
        size: Bytes an element takes.
        category: 0 boolean, 1 integer, 2 floating point: the order of PyTorch's type promotion.
        rank: Position inside the category; a higher rank holds at least the range of a lower one.
        safetensors: Name in a safetensors header.
        coding: For a type that tensors are only stored in, what its codes mean. It is converted to another type before
            it is computed with, and promotes to none.
    """

    name: str
    size: int
    category: int
    rank: int
    safetensors: str
    coding: Coding | None = None

    @property
    def stored(self) -> DType:
        """The type of what lies in memory, as kernels see it: that of the codes, where it has any."""
        return self if self.coding is None else UINT8

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

    def __repr__(self) -> str:
        return f"DType({self.name!r})"


@cache
def _numpy(name: str) -> np.dtype[np.generic]:
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:  # neither knows it: its codes
        return _BY_NAME[name].stored.numpy


_BY_NAME: dict[str, DType] = {}
_BY_NUMPY: dict[np.dtype[np.generic], DType] = {}


def add(kind: DType) -> DType:
    """Enters a data type into the table: models, weight files, kernels of all targets and devices then have it.

    Returns:
        The data type.

    Raises:
        IRError: Its name, or that in safetensors, is another's; or its codes do not fit a byte.
    """
    same = [old for old in ALL if kind.name == old.name or kind.safetensors == old.safetensors]
    if any(old != kind for old in same):
        raise IRError(
            f"given the data type {kind} ({kind.safetensors}), there is already {same[0]}; choose other names"
        )
    if kind.coding is not None and kind.size != 1:
        raise IRError(f"given the data type {kind} with codes of {kind.size} bytes, expected 1")
    _BY_NAME[kind.name] = kind
    _BY_NUMPY.setdefault(kind.numpy, kind)
    return kind


ALL: Collection[DType] = _BY_NAME.values()
"""All data types: a view of the table."""

BOOL = add(DType("bool", 1, 0, 0, "BOOL"))
UINT8 = add(DType("uint8", 1, 1, 0, "U8"))
INT8 = add(DType("int8", 1, 1, 0, "I8"))
INT16 = add(DType("int16", 2, 1, 1, "I16"))
INT32 = add(DType("int32", 4, 1, 2, "I32"))
INT64 = add(DType("int64", 8, 1, 3, "I64"))
FLOAT16 = add(DType("float16", 2, 2, 0, "F16"))
BFLOAT16 = add(DType("bfloat16", 2, 2, 0, "BF16"))
FLOAT32 = add(DType("float32", 4, 2, 1, "F32"))
FLOAT64 = add(DType("float64", 8, 2, 2, "F64"))
FLOAT8_E4M3FN = add(DType("float8_e4m3fn", 1, 2, -1, "F8_E4M3", SmallFloat(4, 3, has_infinity=False)))
FLOAT8_E5M2 = add(DType("float8_e5m2", 1, 2, -1, "F8_E5M2", SmallFloat(5, 2, has_infinity=True)))
FLOAT8_E8M0FNU = add(DType("float8_e8m0fnu", 1, 2, -1, "F8_E8M0", PowerOfTwo()))

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


def converts(given: DType, wanted: DType) -> bool:
    """Whether numbers of a data type may be given where another is expected: both are floating point, without codes."""
    return given.is_float and wanted.is_float and given.coding is wanted.coding is None


def promote(a: DType, b: DType) -> DType:
    """The data type of a binary op on tensors of dtypes `a` and `b`, by PyTorch's rules.

    Raises:
        IRError: One of them is only a type to store in, which promotes to no other.
    """
    if a == b:
        return a
    if a.coding is not None or b.coding is not None:
        raise IRError(f"given {a} and {b}, expected types to compute in; convert the tensor first")
    if a.category != b.category:
        return a if a.category > b.category else b
    if {a, b} == {FLOAT16, BFLOAT16}:
        return FLOAT32
    if {a, b} == {UINT8, INT8}:
        return INT16
    return a if a.rank > b.rank else b
