"""The table of data types."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

from npu_compiler.dtypes import ALL, BFLOAT16, FLOAT16, FLOAT32, INT64, DType, dtype, promote
from npu_compiler.errors import IRError


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_numpy_type_has_the_size_and_the_category_of_the_table(kind: DType) -> None:
    assert kind.numpy.itemsize == kind.size
    assert dtype(kind.numpy) is kind
    assert kind.is_float == (kind.numpy.kind == "f" or hasattr(ml_dtypes, kind.name))
    assert kind.is_integer == (kind.numpy.kind in "iu")


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_torch_has_the_same_name_and_size(kind: DType) -> None:
    found = getattr(torch, kind.name)
    assert found.itemsize == kind.size
    assert dtype(str(found)) is kind


@pytest.mark.parametrize(("first", "second"), list(product(ALL, ALL)), ids=lambda kind: str(kind))
def test_promotion_is_that_of_torch(first: DType, second: DType) -> None:
    kinds = getattr(torch, first.name), getattr(torch, second.name)
    if first != second and (first.coding or second.coding):
        with pytest.raises(RuntimeError, match="not supported"):
            torch.promote_types(*kinds)
        with pytest.raises(IRError, match="expected types to compute in; convert the tensor first"):
            promote(first, second)
    else:
        assert promote(first, second) is dtype(str(torch.promote_types(*kinds)))


def test_aliases_and_the_type_itself_are_found() -> None:
    assert dtype("half") is FLOAT16
    assert dtype("torch.long") is INT64
    assert dtype(np.float32) is FLOAT32
    assert dtype(BFLOAT16) is BFLOAT16


@pytest.mark.parametrize("unknown", ["float8", "", None, 3, np.complex64, object(), ["float32"]])
def test_an_unknown_type_is_refused_with_the_known_ones(unknown: object) -> None:
    with pytest.raises(IRError, match="expected one of bool, uint8"):
        dtype(unknown)
