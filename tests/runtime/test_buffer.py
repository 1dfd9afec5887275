"""Tensors on the device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from npu_compiler.dtypes import ALL, FLOAT16, FLOAT32, INT32, DType
from npu_compiler.errors import InputError
from npu_compiler.tensor.layout import BufferSpec, Layout, dense
from npu_runtime import Device, NPUBuffer


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_without_a_spec_the_array_goes_there_and_back_as_it_is(device: Device, kind: DType) -> None:
    array = np.arange(1, 7).reshape(2, 3).astype(kind.numpy)  # not every type has a zero
    buffer = NPUBuffer.from_numpy(array, device)
    assert (buffer.shape, buffer.alloc_shape, buffer.dtype, buffer.nbytes) == ((2, 3), (2, 3), kind, 6 * kind.size)
    result = buffer.to_numpy()
    np.testing.assert_array_equal(result, array)
    assert result.dtype == kind.numpy


@pytest.mark.parametrize("array", [np.zeros((0, 3), np.float16), np.array(2, np.int64)], ids=["empty", "scalar"])
def test_tensors_without_elements_or_dimensions(device: Device, array: Any) -> None:
    result = NPUBuffer.from_numpy(array, device).to_numpy()
    np.testing.assert_array_equal(result, array)
    assert result.shape == array.shape


def test_a_spec_says_dtype_layout_and_padding(device: Device) -> None:
    spec = BufferSpec("x", FLOAT16, FLOAT32, Layout((1, 3, 2, 2), (1, 8, 2, 2), (0, 2, 3, 1)))
    array = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    buffer = NPUBuffer.from_numpy(array, device, spec=spec)
    assert buffer.nbytes == 64
    stored = buffer.data.reading().view(np.float16).reshape(1, 2, 2, 8)
    np.testing.assert_array_equal(stored[..., :3], array.transpose(0, 2, 3, 1))
    assert not stored[..., 3:].any()
    np.testing.assert_array_equal(buffer.to_numpy(spec=spec), array)
    assert "padded to (1, 8, 2, 2)" in repr(buffer)


def test_an_array_that_is_not_contiguous(device: Device) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    np.testing.assert_array_equal(NPUBuffer.from_numpy(array, device).to_numpy(), array)


def test_what_to_numpy_gave_does_not_change_with_the_buffer(device: Device) -> None:
    buffer = NPUBuffer.from_numpy(np.ones(4, np.float16), device)
    before = buffer.to_numpy()
    with buffer.data.writing() as memory:
        memory[:] = 0
    assert before.all()
    assert not buffer.to_numpy().any()


def test_the_host_cannot_write_through_a_reading(device: Device) -> None:
    with pytest.raises(ValueError, match="read-only"):
        NPUBuffer.from_numpy(np.ones(4, np.float16), device).data.reading()[0] = 1


def test_zeros(device: Device) -> None:
    buffer = NPUBuffer.zeros((2, 3), device, alloc_shape=(2, 8), dtype="bfloat16")
    assert (buffer.nbytes, buffer.alloc_shape) == (32, (2, 8))
    result = buffer.to_numpy()
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result, np.zeros((2, 3)))
    assert NPUBuffer.zeros((4,), device).dtype is FLOAT16


@pytest.mark.parametrize("alloc_shape", [(2,), (2, 2), (2, 3, 1)])
def test_zeros_in_a_smaller_allocation_are_refused(device: Device, alloc_shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected one that holds the other"):
        NPUBuffer.zeros((2, 3), device, alloc_shape=alloc_shape)


def test_zeros_of_no_such_dtype_are_refused(device: Device) -> None:
    with pytest.raises(InputError, match="float8"):
        NPUBuffer.zeros((2, 3), device, dtype="float8")


@pytest.mark.parametrize("given", [[1.0], 2.0, None, "x", np.ndarray, torch.zeros(3, device="meta")])
def test_anything_but_an_array_is_refused(device: Device, given: Any) -> None:
    with pytest.raises(InputError, match=r"expected a numpy array, a tensor of torch|that numpy cannot read"):
        NPUBuffer.from_numpy(given, device)


def test_an_array_of_a_dtype_that_no_device_has_is_refused(device: Device) -> None:
    with pytest.raises(InputError, match="complex64"):
        NPUBuffer.from_numpy(np.zeros(3, np.complex64), device)


@pytest.mark.parametrize(
    "spec",
    [
        BufferSpec("y", INT32, INT32, dense((2, 3))),
        BufferSpec("y", FLOAT16, FLOAT16, dense((3, 2))),
        BufferSpec("y", FLOAT16, FLOAT16, Layout((2, 3), (2, 4), (0, 1))),
        BufferSpec("y", FLOAT16, FLOAT16, Layout((2, 3), (2, 3), (1, 0))),
    ],
)
def test_reading_as_another_tensor_is_refused(device: Device, spec: BufferSpec) -> None:
    with pytest.raises(InputError, match=r"the buffer holds float16 \(2, 3\)"):
        NPUBuffer.zeros((2, 3), device).to_numpy(spec=spec)


def test_the_order_of_dimensions_of_one_element_does_not_matter(device: Device) -> None:
    spec = BufferSpec("y", FLOAT16, FLOAT16, Layout((1, 3, 1), (1, 3, 1), (2, 1, 0)))
    assert NPUBuffer.zeros((1, 3, 1), device).fits(spec)
