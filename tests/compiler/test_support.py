"""Supported means: it lowers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_compiler
from tests.support.ir_builder import IRBuilder


def node_of(op: str, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> dict[str, Any]:
    """The IR's JSON of one node; tuples of sizes become tensors."""
    builder = IRBuilder()
    values = [builder.input(f"x{i}", arg, dtype) if isinstance(arg, tuple) else arg for i, arg in enumerate(args)]
    builder.call(op, *values, **kwargs)
    node: dict[str, Any] = builder.build()["nodes"][0]
    return node


def test_a_supported_node_is_true_and_has_no_reason() -> None:
    support = npu_compiler.is_op_supported(node_of("aten.relu.default", (2, 3)))
    assert support
    assert support.reason == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_a_node_may_be_of_any_float(dtype: torch.dtype) -> None:
    assert npu_compiler.is_op_supported(node_of("aten.linear.default", (2, 8), (4, 8), dtype=dtype))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (node_of("aten.special_bessel_j0.default", (2, 3)), "no definition"),
        (node_of("aten.rrelu.default", (2, 3), 0.1, 0.3, True), "training=True"),
        (node_of("aten.relu.default", (2, 3), dtype=torch.float64), "float64"),
        (node_of("aten.dropout.default", (2, 3), 0.5, True), "model.eval()"),
        (node_of("aten.relu.default", (1,) * 9), "9 dimensions"),
    ],
)
def test_an_unsupported_node_says_why(node: dict[str, Any], reason: str) -> None:
    support = npu_compiler.is_op_supported(node)
    assert not support
    assert reason in support.reason


def test_the_same_op_may_be_supported_with_other_attributes() -> None:
    assert npu_compiler.is_op_supported(node_of("aten.pad.default", (2, 3), [1, 2], "constant"))


def test_a_malformed_node_is_unsupported_and_not_an_error() -> None:
    assert "'inputs'" in npu_compiler.is_op_supported({"name": "n", "op_type": "aten.relu.default"}).reason


def test_supported_ops_are_sorted_aten_names() -> None:
    names = npu_compiler.get_supported_ops()
    assert list(names) == sorted(set(names))
    assert {"aten.conv2d.default", "aten.relu_.default", "aten.softmax.int"} <= set(names)
