"""Layouts and buffer specs: where each element lies, and what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_compiler.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, INT32, INT64, DType
from npu_compiler.errors import InputError
from npu_compiler.tensor.layout import BufferSpec, Layout, dense


@dataclass
class Case:
    layout: Layout
    array: NDArray[Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout of rank 0 to 4, some dimensions empty, some padded, in any order; and an array for it."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    padding = draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    layout = Layout(shape, tuple(n + p for n, p in zip(shape, padding, strict=True)), order)
    seed = draw(st.integers(0, 2**32 - 1))
    return Case(layout, np.random.default_rng(seed).integers(1, 1000, shape).astype(np.float32))


@given(cases())
def test_unpack_undoes_pack(case: Case) -> None:
    flat = case.layout.pack(case.array)
    assert flat.shape == (case.layout.size,)
    unpacked = case.layout.unpack(flat)
    np.testing.assert_array_equal(unpacked, case.array)
    assert unpacked.flags.c_contiguous
    assert not np.shares_memory(unpacked, flat)


@given(cases())
def test_every_element_lies_where_the_strides_say(case: Case) -> None:
    flat = case.layout.pack(case.array)
    for index in np.ndindex(*case.layout.shape):
        place = sum(i * stride for i, stride in zip(index, case.layout.strides, strict=True))
        assert flat[place] == case.array[index]


@given(cases())
def test_padding_is_zero(case: Case) -> None:
    assert np.count_nonzero(case.layout.pack(case.array)) == case.array.size


@given(cases())
def test_encoding_into_memory_writes_the_bytes_that_encode_gives(case: Case) -> None:
    spec = BufferSpec("x", FLOAT16, FLOAT32, case.layout)
    memory = np.full(spec.nbytes + 3, 255, np.uint8)
    spec.encode_into(case.array, memory)
    np.testing.assert_array_equal(memory[: spec.nbytes], spec.encode(case.array).view(np.uint8))
    assert (memory[spec.nbytes :] == 255).all()
    decoded = spec.decode(memory[: spec.nbytes])
    np.testing.assert_array_equal(decoded, case.array)
    assert decoded.dtype == np.float32
    assert decoded.flags.c_contiguous


def test_channels_last_with_padded_channels() -> None:
    layout = Layout((1, 3, 2, 2), (1, 64, 2, 2), (0, 2, 3, 1))
    assert layout.strides == (256, 1, 128, 64)
    assert layout.size == 256
    assert layout.is_padded
    assert not dense((1, 3, 2, 2)).is_padded


def test_a_scalar_is_an_array_of_no_dimension() -> None:
    spec = BufferSpec("s", FLOAT16, FLOAT32, dense(()))
    decoded = spec.decode(spec.encode(np.array(1.5, np.float32)))
    assert isinstance(decoded, np.ndarray)
    assert decoded.shape == ()
    assert decoded == 1.5


@pytest.mark.parametrize("given_type", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16, FLOAT32])
def test_any_floating_point_array_fits_a_floating_point_spec(kind: DType, given_type: type) -> None:
    spec = BufferSpec("x", kind, FLOAT32, dense((3,)))
    decoded = spec.decode(spec.encode(np.array([1, -2, 0.5], given_type)))
    np.testing.assert_array_equal(decoded, np.array([1, -2, 0.5], np.float32))


@pytest.mark.parametrize(
    ("spec", "array"),
    [
        (BufferSpec("x", FLOAT16, FLOAT32, dense((3,))), np.ones(3, np.int64)),
        (BufferSpec("x", FLOAT16, FLOAT32, dense((3,))), np.ones(3, np.complex64)),
        (BufferSpec("x", FLOAT16, FLOAT32, dense((3,))), np.ones(3, np.bool_)),
        (BufferSpec("x", INT32, INT64, dense((3,))), np.ones(3, np.float32)),
        (BufferSpec("x", INT32, INT64, dense((3,))), np.ones(3, np.int16)),
        (BufferSpec("x", BOOL, BOOL, dense((3,))), np.ones(3, np.uint8)),
    ],
)
def test_an_array_of_another_kind_is_refused(spec: BufferSpec, array: NDArray[Any]) -> None:
    with pytest.raises(InputError, match=rf"'x': given an array of dtype {array.dtype}, expected {spec.host_dtype}"):
        spec.encode(array)


@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (1, 3)])
def test_an_array_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"given an array of shape .*, expected \(3,\)"):
        BufferSpec("x", FLOAT16, FLOAT32, dense((3,))).encode(np.zeros(shape, np.float32))


def test_integers_that_the_device_cannot_hold_are_refused() -> None:
    spec = BufferSpec("ids", INT32, INT64, dense((2,)))
    np.testing.assert_array_equal(spec.decode(spec.encode(np.array([-5, 2**31 - 1]))), [-5, 2**31 - 1])
    with pytest.raises(InputError, match="given integers from 0 to 2147483648, expected -2147483648 to 2147483647"):
        spec.encode(np.array([0, 2**31]))


def test_what_is_too_large_for_the_device_is_refused() -> None:
    """Infinities, which masks hold, stay what they are; bfloat16 reaches as far as float32."""
    spec = BufferSpec("x", FLOAT16, FLOAT32, dense((3,)))
    with pytest.raises(InputError, match=r"'x': given values up to 1e\+06 in magnitude.*up to 65504.*dtype='bfloat16'"):
        spec.encode(np.array([1, -1e6, np.inf], np.float32))
    limits = np.array([65504, -np.inf, np.inf], np.float32)
    np.testing.assert_array_equal(spec.encode(limits), limits)
    wide = BufferSpec("x", BFLOAT16, FLOAT32, dense((1,)))
    np.testing.assert_allclose(np.asarray(wide.encode(np.array([1e6], np.float32)), np.float32), 1e6, rtol=2**-8)
