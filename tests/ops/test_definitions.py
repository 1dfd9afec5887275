"""The definitions against the ATen schemas, and the cases' IR against the extraction's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_compiler
from npu_compiler.ops import definition, get_supported_ops
from tests.support.extraction import Function
from tests.support.ir_builder import IRBuilder, overload_of

ATEN = [op for op in get_supported_ops() if op.startswith("aten.")]


@pytest.mark.parametrize("op", ATEN)
def test_every_attribute_of_the_schema_has_a_parameter(op: str) -> None:
    entry = definition(op)
    assert entry is not None
    known = {parameter.name for parameter in entry.parameters}
    attributes = [argument for argument in overload_of(op)._schema.arguments if str(argument.type) != "Tensor"]
    assert {argument.name for argument in attributes} <= known


@pytest.mark.parametrize("op", ATEN)
def test_defaults_are_those_of_the_schema(op: str) -> None:
    entry = definition(op)
    assert entry is not None
    parameters = {parameter.name: parameter for parameter in entry.parameters}
    for argument in overload_of(op)._schema.arguments:
        if argument.has_default_value() and argument.name not in _SAME_AS_NONE:
            parameter = parameters[argument.name]
            assert not parameter.is_required
            own, theirs = parameter.default, argument.default_value
            assert _normal(own) == _normal(theirs), argument.name


_SAME_AS_NONE = {"value", "memory_format"}  # None pads with zeros; memory formats change no value


def _normal(default: Any) -> Any:
    """Defaults that mean the same compare equal: sequences by their values, one value for all dimensions by itself."""
    if isinstance(default, (list, tuple)):
        values = set(default)
        return values.pop() if len(values) == 1 else None if not values else list(default)
    return None if default is False else _SAME.get(default, default)


_SAME = {"valid": 0}  # padding


def _add_scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x, y, alpha=3)


def _convolve(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x[None, None], y[None, None], stride=2)


def _halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = torch.split(torch.cat([x, y], 1), 4, 1)
    return (first + second).to(torch.float16)


def _built(function: Any) -> dict[str, Any]:
    builder = IRBuilder()
    x, y = builder.input("x", (4, 4)), builder.input("y", (4, 4))
    if function is _add_scaled:
        return builder.build(builder.call("aten.add.Tensor", x, y, alpha=3, name="add"))
    if function is _halves:
        joined = builder.call("aten.cat.default", [x, y], 1, name="cat")
        first, second = builder.call_all("aten.split.Tensor", joined, 4, 1, name="split")
        total = builder.call("aten.add.Tensor", first, second, name="add")
        return builder.build(builder.call("aten.to.dtype", total, torch.float16, name="to"))
    image = builder.call("aten.unsqueeze.default", builder.call("aten.unsqueeze.default", x, 0), 1)
    kernel = builder.call("aten.unsqueeze.default", builder.call("aten.unsqueeze.default", y, 0), 1)
    return builder.build(builder.call("aten.conv2d.default", image, kernel, None, [2, 2]))


@pytest.mark.parametrize("function", [_add_scaled, _convolve, _halves])
def test_the_cases_ir_is_what_extraction_writes(function: Any) -> None:
    example = (torch.ones(4, 4), torch.ones(4, 4))
    extracted = npu_compiler.extract(Function(lambda x, y: function(x, y)), example).ir
    ours = _built(function)
    if function is _convolve:  # the ways to the operands differ; the node itself counts
        extracted, ours = ({"nodes": ir["nodes"][-1:]} for ir in (extracted, ours))
    assert _shape_of(ours) == _shape_of(extracted)


def _shape_of(ir: Any) -> list[Any]:
    """Nodes without the names that torch.export gives."""
    return [
        (
            node["op_type"],
            node["attrs"],
            [(t["shape"], t["dtype"]) for t in node["inputs"]],
            [(t["shape"], t["dtype"]) for t in node["outputs"]],
        )
        for node in ir["nodes"]
    ]
