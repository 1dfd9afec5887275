"""Strided views against numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_compiler.tensor.view import View, collapse
from tests.support.evaluate import positions

_SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def _whole(shape: tuple[int, ...]) -> View:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return View(shape, tuple(strides))


def _step(draw: Any, view: View, array: NDArray[Any]) -> tuple[View | None, NDArray[Any]]:
    """One drawn operation on a view, and on the array that it reads."""
    rank = array.ndim
    kind = draw(st.sampled_from(["permute", "expand", "slice", "reshape"]))
    if kind == "permute":
        order = tuple(draw(st.permutations(range(rank))))
        return view.apply(("permute", order)), array.transpose(order)
    if kind == "expand":
        shape = tuple(3 if n == 1 and draw(st.booleans()) else n for n in array.shape)
        shape = (*draw(st.sampled_from([(), (2,)])), *shape)
        return view.apply(("expand", shape)), np.broadcast_to(array, shape)
    if kind == "slice" and array.size and rank:
        dim = draw(st.integers(0, rank - 1))
        start = draw(st.integers(0, array.shape[dim] - 1))
        step = draw(st.integers(1, 3))
        length = draw(st.integers(0, (array.shape[dim] - start + step - 1) // step))
        window = [slice(None)] * rank
        window[dim] = slice(start, start + length * step, step)
        return view.apply(("slice", (dim, start, length, step))), array[tuple(window)]
    new = tuple(draw(st.permutations(array.shape)))
    new = (*new, 1) if draw(st.booleans()) else (int(array.size),)
    return view.apply(("reshape", new)), array.reshape(new)


@given(st.data())
def test_a_chain_of_operations_reads_what_numpy_reads(data: st.DataObject) -> None:
    shape = data.draw(_SHAPES)
    view = _whole(shape)
    array = np.arange(int(np.prod(shape))).reshape(shape)
    for _ in range(data.draw(st.integers(1, 5))):
        following, array = _step(data.draw, view, array)
        if following is None:
            return
        view = following
        assert view.shape == array.shape
        if array.size:
            np.testing.assert_array_equal(positions(view), array)


@given(st.data())
def test_a_reshape_is_refused_only_where_numpy_would_copy(data: st.DataObject) -> None:
    shape = data.draw(_SHAPES)
    memory = np.arange(int(np.prod(shape)), dtype=np.int64)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    view, array = _whole(shape).permute(order), memory.reshape(shape).transpose(order)
    new = tuple(data.draw(st.permutations(shape)))
    reshaped = array.reshape(new)
    assert (view.reshape(new) is None) == (not np.shares_memory(reshaped, memory))


@given(st.data())
def test_contiguous_means_numpy_would_not_copy(data: st.DataObject) -> None:
    shape = data.draw(_SHAPES)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    array = np.zeros(shape).transpose(order)
    assert _whole(shape).permute(order).is_contiguous == array.flags.c_contiguous


@given(st.data())
def test_collapsed_dimensions_enumerate_the_same_elements(data: st.DataObject) -> None:
    shape = data.draw(_SHAPES)
    operands = []
    for _ in range(data.draw(st.integers(1, 3))):
        view = _whole(shape).permute(tuple(data.draw(st.permutations(range(len(shape))))))
        kept = tuple(1 if data.draw(st.booleans()) else n for n in shape)
        operands.append(View(kept, view.strides).expand(shape))
    sizes, strides = collapse(shape, [operand.strides for operand in operands])
    assert all(size > 1 for size in sizes) or sizes == (1,)
    for operand, walked in zip(operands, strides, strict=True):
        np.testing.assert_array_equal(positions(View(sizes, walked)).reshape(-1), positions(operand).reshape(-1))


def test_collapse_leaves_no_dimension_that_could_be_merged() -> None:
    assert collapse((2, 3, 4), [(12, 4, 1), (12, 4, 1)]) == ((24,), [(1,), (1,)])
    assert collapse((2, 3, 4), [(12, 4, 1), (0, 4, 1)]) == ((2, 12), [(12, 1), (0, 1)])
    assert collapse((), [(), ()]) == ((1,), [(0,), (0,)])


def test_the_stride_of_a_dimension_of_size_one_does_not_matter() -> None:
    assert View((3, 1), (1, 7)).same_elements(View((3, 1), (1, 0)))
    assert not View((3, 2), (2, 1)).same_elements(View((3, 2), (1, 3)))
    assert not View((3,), (1,), 0).same_elements(View((3,), (1,), 1))
