"""Tracing: the definition of each node's op is called with symbolic tensors, and the trace collects what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npu_compiler.dtypes import DType
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.binding import Kind
from npu_compiler.ops.registry import definition, is_in_place, traits_of
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, Trace, full
from npu_compiler.tensor.trace import LayoutRule

__all__ = ["makers_of_numbers", "results_of", "trace_graph"]


def trace_graph(graph: IRGraph, layouts: LayoutRule) -> tuple[Trace, dict[str, Tensor]]:
    """Traces a whole graph.

    Returns:
        The trace, and the symbolic tensor of every input, weight and node output by name.

    Raises:
        UnsupportedOpError: A definition refuses its arguments.
        IRError: A node's result differs from what the IR declares.
    """
    trace = Trace(layouts)
    env: dict[str, Tensor] = {}
    roles = _source_roles(graph)
    for name in (*graph.inputs, *graph.weights):
        spec = graph.tensors[name]
        env[name] = trace.add(name, spec.shape, spec.dtype, roles.get(name, "plain"))
        recipe = graph.weights.get(name)
        if recipe is not None and recipe.data and recipe.spec.host_dtype.is_integer:
            numbers = np.frombuffer(recipe.data, recipe.spec.host_dtype.numpy)
            trace.bounds[len(trace.tensors) - 1] = int(numbers.min()), int(numbers.max())
    for node in graph.nodes:
        trace.node = node.name
        declared = [graph.tensors[name] for name in node.outputs]
        for result, spec in zip(results_of(node, env, trace, declared), declared, strict=True):
            env[spec.name] = _as_declared(result, spec.dtype)
    trace.names = {}  # tensors know their trace: what goes round is freed late
    return trace, env


def results_of(
    node: OpNode, env: Mapping[str, Tensor], trace: Trace, declared: Sequence[TensorSpec]
) -> tuple[Tensor, ...]:
    """Calls the definition of a node's op, and compares what it gives with what the IR declares.

    Of a further result without elements, or for gradients, the IR has the last word: the statistics that a norm used
    are empty where it was exported on the CPU, and have a value for each channel elsewhere.

    Raises:
        UnsupportedOpError: The definition refuses these arguments.
        IRError: A result differs.
    """
    first, *others = call(node, env, trace) or (None,)
    any_shape = traits_of(node.op).for_gradients
    rest = [
        full(trace, spec.shape, 0, spec.dtype)
        if (any_shape or 0 in spec.shape) and spec.shape != result.shape
        else result
        for result, spec in zip(others, declared[1:], strict=True)
    ]
    results = () if first is None else (first, *rest)
    if results and is_in_place(node.op) and results[0].dtype.category < declared[0].dtype.category:
        results = (results[0].cast(declared[0].dtype), *rest)  # it keeps its data type, and takes what that can hold
    for result, spec in zip(results, declared, strict=True):
        if result.shape != spec.shape or result.dtype.category != spec.dtype.category:
            raise IRError(
                f"node '{node.name}' ({node.op}): the IR declares '{spec}', its definition gives "
                f"{result.dtype}{list(result.shape)}; extract the model again"
            )
    return results


def _as_declared(result: Tensor, dtype: DType) -> Tensor:
    """The result in the data type that the graph declares, as a tensor of the trace; a view stays one."""
    if result.dtype != dtype:
        result = result.cast(dtype)
    return result.realize()


def makers_of_numbers(graph: IRGraph) -> frozenset[str]:
    """Names of the nodes that make numbers of codes."""
    return frozenset(node.name for node in graph.nodes if traits_of(node.op).makes_numbers)


def call(node: OpNode, env: Mapping[str, Tensor], trace: Trace) -> tuple[Tensor, ...]:
    """Calls the definition of a node's op.

    Raises:
        UnsupportedOpError: The definition refuses these arguments.
    """
    entry = definition(node.op)
    if entry is None:
        raise UnsupportedOpError(node.name, node.op, "no definition of this op is registered")
    arguments: dict[str, Any] = dict(node.attrs)
    trace.names = {env[name]: name for name in node.tensors()}
    for key, value in node.inputs.items():
        arguments[key] = env[value] if isinstance(value, str) else tuple(env[v] for v in value)
    for parameter in entry.parameters:
        if parameter.kind is Kind.ATTRIBUTE and arguments.get(parameter.name, 0) is None and not parameter.is_required:
            arguments.pop(parameter.name)
        elif parameter.kind is Kind.OPTIONAL:
            arguments.setdefault(parameter.name, None)
    try:
        result = entry.function(trace, **arguments) if entry.creates else entry.function(**arguments)
    except OpRefusal as refusal:
        raise UnsupportedOpError(node.name, node.op, str(refusal)) from None
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise UnsupportedOpError(
            node.name, node.op, f"its attributes have unexpected types or values ({error})"
        ) from error
    results = result if isinstance(result, tuple) else (result,)
    if len(results) < len(node.outputs):
        raise UnsupportedOpError(
            node.name, node.op, f"{len(node.outputs)} outputs are used, {len(results)} are supported"
        )
    return results[: len(node.outputs)]


def _source_roles(graph: IRGraph) -> dict[str, str]:
    """Roles of the graph's inputs and weights: images where a convolution, a pooling or a BatchNorm reads them.

    An image is also what becomes one through elementwise ops, so that the layout does not change on the way.
    """
    roles: dict[str, str] = {}
    for node in reversed(graph.nodes):
        known = traits_of(node.op)
        if known.images:
            for key, value in node.inputs.items():
                ranked = isinstance(value, str) and len(graph.tensors[value].shape) in known.image_ranks
                if key in known.images and ranked:
                    roles[str(value)] = known.images[key]
            continue
        output = graph.tensors[node.outputs[0]] if node.outputs else None
        if output is not None and roles.get(output.name) == "image":
            for name in node.tensors():
                if graph.tensors[name].shape == output.shape:
                    roles.setdefault(name, "image")
    return roles
