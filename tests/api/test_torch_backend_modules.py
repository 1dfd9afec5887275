"""PyTorch's own modules with PyTorch's own sample inputs, by `torch.compile(module, backend="npu")`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.support.dynamo import compiled

common_modules = pytest.importorskip("torch.testing._internal.common_modules", exc_type=ImportError)

_TOLERANCE = 1e-2  # of the largest number of a result, on a device that computes in float16
_SMALLEST = 1e-3
_SAME_PLACES = 0.9

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]


def samples(info: Any) -> list[Any]:
    """The first sample that PyTorch calls a module with, and the last: the plainest, and one with most options."""
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
    called = [sample for sample in made if sample.forward_input is not None]
    return called[:1] + called[1:][-1:]


def converted(dtype: torch.dtype) -> Callable[[Any], Any]:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    return lambda nested: tree_map_only(torch.Tensor, convert, nested)


def check(found: Any, eager: Any, exact: Any) -> None:
    """Structure, shapes, data types and devices are those of `eager`, and numbers those of `exact`, in float64."""
    items, structure = tree_flatten(found)
    models, expected = tree_flatten(eager)
    assert structure == expected
    for item, model, wanted in zip(items, models, tree_flatten(exact)[0], strict=True):
        if not isinstance(model, torch.Tensor):
            assert item == model
            continue
        assert (item.shape, item.dtype, item.device) == (model.shape, model.dtype, model.device)
        if item.is_floating_point():
            largest = float(wanted.abs().nan_to_num(posinf=0).max()) if wanted.numel() else 0.0
            atol = _TOLERANCE * max(largest, _SMALLEST)
            torch.testing.assert_close(item.double(), wanted, rtol=0, atol=atol, equal_nan=True)
        elif not item.equal(model):  # of two elements that float16 does not tell apart, either is the greatest
            assert (item == model).double().mean() > _SAME_PLACES


@pytest.mark.parametrize("info", common_modules.module_db, ids=lambda info: info.name)
def test_a_module_of_pytorch(info: Any) -> None:
    as_given, exactly = converted(torch.float32), converted(torch.float64)
    for sample in samples(info):
        torch._dynamo.reset()
        torch.manual_seed(1)
        args, kwargs = as_given((sample.constructor_input.args, sample.constructor_input.kwargs))
        module = info.module_cls(*args, **kwargs).eval()
        given = sample.forward_input.args, sample.forward_input.kwargs
        with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True), warnings.catch_warnings():
            args, kwargs = as_given(given)
            eager = module(*args, **kwargs)  # sees to it that a lazy module has its parameters
            args, kwargs = exactly(given)
            exact = copy.deepcopy(module).double()(*args, **kwargs)
            warnings.filterwarnings("error", "a graph runs in PyTorch")
            fast = compiled(module)
            for _ in range(2):
                args, kwargs = as_given(given)
                check(fast(*args, **kwargs), eager, exact)
