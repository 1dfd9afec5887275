"""Elements of any type and order made from those of another, by kernels of the runtime's own."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_runtime.conversion import Conversion, ask_all, conversion_text
from npu_runtime import Device
from tests.cuda.kernels import compile_together

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_PAIRS = [*product(_FLOATS, repeat=2), *product(_INTEGERS, repeat=2), ("bool", "bool")]


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_kernels_compile(architecture: int) -> None:
    pairs = _PAIRS[::5] if architecture == 70 else [("float32", "bfloat16"), ("float64", "float16")]
    kernels = ("convert_small", "convert_large", "convert_turned", "convert_wide")
    compile_together([(conversion_text(*pair), kernels) for pair in pairs], architecture)


def _converted(array: NDArray[Any], target: Any, device: Device, axes: tuple[int, ...]) -> tuple[NDArray[Any], bool]:
    """The array in another dtype, its memory in the order of `axes`; and whether a value was lost."""
    import cupy

    with device.backend.active():  # type: ignore[attr-defined]
        source = cupy.asarray(array)
        order = [array.shape[axis] for axis in axes]
        made = cupy.zeros(order, target).transpose(np.argsort(axes))
        lost = cupy.zeros(1, cupy.uint32)
        Conversion(source, made).ask(device.backend.stream, lost)  # type: ignore[attr-defined]
        return cupy.asnumpy(made), bool(lost.get()[0])


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@pytest.mark.parametrize(("source", "target"), _PAIRS)
def test_values_are_those_of_numpy(device: Device, rng: np.random.Generator, source: str, target: str) -> None:
    if source in _FLOATS:
        array = rng.standard_normal((3, 5, 7, 9)).astype(_dtype(source))
        array[0, 0, 0, :3] = np.nan, np.inf, -0.0
    else:
        array = rng.integers(0, 2 if source == "bool" else 127, (3, 5, 7, 9)).astype(source)
    for axes in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)):
        made, lost = _converted(array, _dtype(target), device, axes)
        assert not lost
        wanted = array.astype(_dtype(target))
        assert made.dtype == wanted.dtype
        np.testing.assert_array_equal(made.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize(("source", "target"), [*pairwise(_FLOATS), ("uint8", "uint8")])
@pytest.mark.parametrize("shape", [(7, 130, 300), (11, 64, 5, 77), (16, 17_000), (1, 17, 1, 16_001)], ids=str)
def test_large_tensors_are_turned(
    device: Device, rng: np.random.Generator, source: str, target: str, shape: tuple[int, ...]
) -> None:
    array = rng.integers(-99 if source in _FLOATS else 0, 99, shape).astype(_dtype(source))
    axes = (*(axis for axis in range(len(shape)) if axis != 1), 1) if len(shape) > 2 else (1, 0)
    made, lost = _converted(array, _dtype(target), device, axes)
    assert not lost
    np.testing.assert_array_equal(made.astype(np.float64), array.astype(np.float64))


@pytest.mark.parametrize(("source", "target"), _PAIRS)
@pytest.mark.parametrize("shape", [(3, 5, 32), (2, 3, 8, 12), (160,), (3, 5, 7)], ids=str)
def test_numbers_are_read_over_the_bus(
    device: Device, rng: np.random.Generator, source: str, target: str, shape: tuple[int, ...]
) -> None:
    import cupy

    array = rng.integers(0, 2, shape).astype(_dtype(source))
    backend: Any = device.backend
    for start in (0, 1):  # of which one begins where no 16 bytes do
        memory = backend.allocate_visible(array.nbytes + 16)
        pinned = memory.content[start * array.itemsize :][: array.nbytes].view(array.dtype).reshape(shape)
        pinned[...] = array
        with backend.active():
            stored = memory.array[start * array.itemsize :][: array.nbytes].view(array.dtype).reshape(shape)
            made = cupy.zeros((*shape[1:], shape[0] + 1), _dtype(target))[..., :-1].transpose(
                len(shape) - 1, *range(len(shape) - 1)
            )
            lost = cupy.zeros(1, cupy.uint32)
            Conversion(stored, made, from_host=True).ask(backend.stream, lost)
            np.testing.assert_array_equal(cupy.asnumpy(made).astype(float), array.astype(float))
            assert not lost.get()[0]
            assert not cupy.asnumpy(made.base).astype(float)[..., -1].any()


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("float32", "float16", 70000.0),
        ("float64", "float16", -1e9),
        ("bfloat16", "float16", 1e20),
        ("float64", "float32", 1e300),
        ("float64", "bfloat16", 1e300),
        ("float32", "bfloat16", 3.4028234e38),
        ("int64", "int32", 2**31),
        ("int64", "int8", -129),
        ("int32", "uint8", -1),
        ("int8", "uint8", -1),
        ("uint8", "int8", 128),
    ],
)
def test_a_value_that_is_too_large_is_noted(device: Device, source: str, target: str, value: float) -> None:
    array = np.zeros((4, 6), _dtype(source))
    assert not _converted(array, _dtype(target), device, (1, 0))[1]
    array[3, 2] = value
    assert _converted(array, _dtype(target), device, (1, 0))[1]


def test_many_dimensions_and_strides_that_repeat_or_run_backwards(device: Device, rng: np.random.Generator) -> None:
    import cupy

    array = rng.standard_normal((2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2)).astype(np.float32)
    axes = tuple(int(axis) for axis in rng.permutation(array.ndim))
    np.testing.assert_array_equal(_converted(array, np.float16, device, axes)[0], array.astype(np.float16))
    with device.backend.active():  # type: ignore[attr-defined]
        source = cupy.broadcast_to(cupy.arange(6.0)[::-1], (4, 6))
        made = cupy.zeros((4, 6), cupy.float32)
        Conversion(source, made).ask(device.backend.stream, cupy.zeros(1, cupy.uint32))  # type: ignore[attr-defined]
        np.testing.assert_array_equal(made.get(), np.broadcast_to(np.arange(6.0)[::-1], (4, 6)))
        Conversion(cupy.zeros((0, 3)), cupy.zeros((0, 3), cupy.float32)).ask(device.backend.stream, None)  # type: ignore[attr-defined]


def test_many_tensors_share_launches(device: Device, rng: np.random.Generator) -> None:
    """Of several data types and orders, more than a launch takes, large ones and empty ones among them."""
    import cupy

    sizes = [3, 1, 70, 5000, 0, 64, 1 << 17, 9, 8, 7, 6, 5, 4, 300]
    kinds = [("float32", "float16"), ("float16", "float32"), ("float16", "float16"), ("int64", "int32")]
    arrays = [
        rng.integers(-99, 99, (size, 3)).astype(source)
        for number, size in enumerate(sizes)
        for source, _ in kinds[: 1 + number % 4]
    ]
    targets = [target for number in range(len(sizes)) for _, target in kinds[: 1 + number % 4]]
    backend = device.backend
    with backend.active():  # type: ignore[attr-defined]
        sources = [cupy.asarray(array) for array in arrays]
        made = [
            cupy.zeros(array.shape[::-1], target).T if number % 2 else cupy.zeros(array.shape, target)
            for number, (array, target) in enumerate(zip(arrays, targets, strict=True))
        ]
        lost = cupy.zeros(1, cupy.uint32)
        conversions = [Conversion(source, target) for source, target in zip(sources, made, strict=True)]
        ask_all(conversions, backend.stream, lost)  # type: ignore[attr-defined]
        for array, target in zip(arrays, made, strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(target), array.astype(target.dtype))
        assert not lost.get()[0]
