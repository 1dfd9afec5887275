"""The data types that a float32 model is computed in: of its tensors, and of the numbers in its nodes."""

from __future__ import annotations

from dataclasses import replace
from math import copysign, isfinite

import ml_dtypes
import numpy as np

from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import traits_of
from npu_compiler.ops.traits import Work

__all__ = ["assign_dtypes"]


def assign_dtypes(graph: IRGraph, compute: DType) -> IRGraph:
    """Gives the tensors of a float32 model the compute dtype, all but the angles of sines and cosines, scales of codes,
    counts, and constants that it does not hold.

    Numbers that close positions of a mask, which lie beyond the compute dtype, become its largest: a row that is closed
    everywhere stays a row of equal numbers, where infinities would make its softmax NaN.

    A model whose weights are of a half precision already says itself what is float32 on purpose, and stays as it is; so
    does a part of a model, which is written in the data types of the device.
    """
    if graph.compute_dtype is not None or any(graph.tensors[name].dtype == compute for name in graph.weights):
        return graph
    largest = float(ml_dtypes.finfo(compute.numpy).max)  # type: ignore[no-untyped-call]
    exact: set[str] = set()
    for node in reversed(graph.nodes):
        known = traits_of(node.op)
        exact.update(str(node.inputs[parameter]) for parameter in known.exact if parameter in node.inputs)
        if known.takes_angle or (exact.intersection(node.outputs) and not known.is_learned):
            exact.update(node.tensors())
        if known.is_learned:
            exact.difference_update(node.outputs)
    exact.update(name for node in graph.nodes if traits_of(node.op).counts for name in node.outputs)
    exact.update(name for name, recipe in graph.weights.items() if recipe.data and _is_beyond(recipe, largest))
    tensors = {
        name: TensorSpec(name, spec.shape, compute) if spec.dtype == FLOAT32 and name not in exact else spec
        for name, spec in graph.tensors.items()
    }
    whole = _whole_tensors(graph)
    nodes = tuple(
        _limited(node, whole, largest) if any(tensors[name].dtype == compute for name in node.outputs) else node
        for node in graph.nodes
    )
    return replace(graph, tensors=tensors, nodes=nodes)


def _is_beyond(recipe: WeightRecipe, largest: float) -> bool:
    """Whether a constant has a finite number that is too large for a data type."""
    if recipe.spec.host_dtype != FLOAT32:
        return False
    values = np.abs(np.frombuffer(recipe.data, np.float32))
    return bool((np.isfinite(values) & (values > largest)).any())


def _whole_tensors(graph: IRGraph) -> set[str]:
    """Tensors whose elements are whole numbers by the way they are made: from a mask, say."""
    whole = {name for name, spec in graph.tensors.items() if not spec.dtype.is_float}
    for node in graph.nodes:
        known = traits_of(node.op, node.attrs)
        numbers = (value for value in node.attrs.values() if isinstance(value, float))
        if (known.keeps_whole or known.work is Work.VIEW) and whole.issuperset(node.tensors()):
            whole.update(node.outputs if all(number.is_integer() for number in numbers) else ())
    return whole


def _limited(node: OpNode, whole: set[str], largest: float) -> OpNode:
    """The node with the largest number of the data type in place of those beyond, where they become elements: as they
    are, or as factors of whole numbers, such as those of a mask.
    """
    known = traits_of(node.op, node.attrs)
    names = (*known.fills, *(known.factors if whole.issuperset(node.tensors()) else ()))
    found = {name: node.attrs.get(name) for name in names}
    changed = {
        name: copysign(largest, value)
        for name, value in found.items()
        if isinstance(value, int | float) and isfinite(value) and abs(value) > largest
    }
    return replace(node, attrs={**node.attrs, **changed}) if changed else node
