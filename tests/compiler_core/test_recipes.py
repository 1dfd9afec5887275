"""Weight recipes: the arithmetic against torch, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.dtypes import FLOAT16, FLOAT32
from npu_compiler.errors import InputError, ProgramFormatError
from npu_compiler.tensor.layout import BufferSpec, Layout, dense

EPS = 1e-3


def recipe(shape: tuple[int, ...], transform: str, **attrs: float) -> WeightRecipe:
    spec = BufferSpec("w", FLOAT32, FLOAT32, dense(shape))
    return WeightRecipe(spec, (WeightInput("a", shape, "float32"),), transform, tuple(attrs.items()))


def _normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_folding_a_batch_norm_is_the_batch_norm(has_bias: bool, affine: bool) -> None:
    """conv(x, folded weight, folded bias) = batch_norm(conv(x, weight, bias)), in float64 to float32's precision."""
    weight, bias, mean = _normal(4, 3, 3, 3), _normal(4, seed=1), _normal(4, seed=2)
    variance = np.abs(_normal(4, seed=3)) * 1e-4  # small, so that the epsilon and the precision of the scale matter
    gamma, beta = _normal(4, seed=4), _normal(4, seed=5)
    optional = [gamma, beta] if affine else []

    folded = recipe(weight.shape, "fold_weight", eps=EPS).compute([weight, variance, *optional[:1]])
    if has_bias:
        folded_bias = recipe((4,), "fold_given_bias", eps=EPS).compute([bias, mean, variance, *optional])
    else:
        folded_bias = recipe((4,), "fold_bias", eps=EPS).compute([mean, variance, *optional])

    x = torch.from_numpy(_normal(2, 3, 6, 6, seed=6)).double()
    tensors = {
        name: torch.from_numpy(array).double() for name, array in locals().items() if isinstance(array, np.ndarray)
    }
    expected = torch.nn.functional.batch_norm(
        torch.nn.functional.conv2d(x, tensors["weight"], tensors["bias"] if has_bias else None),
        tensors["mean"],
        tensors["variance"],
        tensors["gamma"] if affine else None,
        tensors["beta"] if affine else None,
        eps=EPS,
    )
    result = torch.nn.functional.conv2d(x, tensors["folded"], tensors["folded_bias"])
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-5)


def test_concatenation_takes_any_number_of_weights() -> None:
    parts = [_normal(n, 2, seed=n) for n in (1, 3, 2)]
    np.testing.assert_array_equal(recipe((6, 2), "concatenate").compute(parts), np.concatenate(parts))


def test_interleaving_takes_rows_in_turns() -> None:
    first, second = _normal(3, 2, seed=1), _normal(3, 2, seed=2)
    result = recipe((6, 2), "interleave").compute([first, second])
    np.testing.assert_array_equal(result[0::2], first)
    np.testing.assert_array_equal(result[1::2], second)


def test_apply_casts_pads_and_reorders() -> None:
    layout = Layout((2, 3), (2, 4), (1, 0))
    made = WeightRecipe(BufferSpec("w", FLOAT16, FLOAT32, layout), (WeightInput("a", (2, 3), "float32"),))
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    flat = made.apply([array])
    assert flat.dtype == np.float16
    np.testing.assert_array_equal(flat, [0, 3, 1, 4, 2, 5, 0, 0])


def test_identity_copies_nothing() -> None:
    array = _normal(2, 3)
    assert recipe((2, 3), "identity").compute([array]) is array


def test_a_constant_lies_in_the_recipe() -> None:
    array = _normal(2, 3)
    spec = BufferSpec("c", FLOAT16, FLOAT32, Layout((2, 3), (2, 4), (0, 1)))
    constant = WeightRecipe(spec, (), data=array.tobytes())
    np.testing.assert_array_equal(constant.compute([]), array)
    np.testing.assert_array_equal(constant.apply([]), spec.encode(array))
    empty = WeightRecipe(BufferSpec("e", FLOAT16, FLOAT32, dense((0, 3))), ())
    assert empty.compute([]).shape == (0, 3)
    with pytest.raises(ProgramFormatError, match="a constant of 20 bytes, expected 24"):
        WeightRecipe(spec, (), data=array.tobytes()[:-4]).compute([])


def test_an_unknown_transform_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ProgramFormatError, match="unknown transform 'rotate', known: identity, fold_weight"):
        recipe((1,), "rotate").compute([np.zeros(1)])


@pytest.mark.parametrize(
    ("made", "arrays"),
    [
        (recipe((2,), "identity"), [_normal(2), _normal(2)]),
        (recipe((2,), "fold_weight"), [_normal(2), _normal(2)]),
        (recipe((2,), "fold_bias", eps=EPS, momentum=0.1), [_normal(2), _normal(2)]),
        (recipe((2,), "fold_weight", eps=EPS), [_normal(2, 3), np.ones(5)]),
        (recipe((2,), "concatenate", axis=0), [_normal(2), _normal(2)]),
        (recipe((2,), "interleave"), [_normal(2), _normal(3)]),
    ],
)
def test_inputs_that_a_transform_cannot_take_are_refused(made: WeightRecipe, arrays: list[NDArray[Any]]) -> None:
    with pytest.raises(ProgramFormatError, match=r"weight 'w': '.*' cannot take its inputs"):
        made.compute(arrays)


def test_a_result_of_another_shape_is_refused() -> None:
    with pytest.raises(ProgramFormatError, match=r"recipe gives shape \(3,\), the program says \(2,\)"):
        recipe((2,), "identity").compute([_normal(3)])


def test_a_result_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="dtype int64"):
        recipe((2,), "identity").apply([np.zeros(2, np.int64)])
