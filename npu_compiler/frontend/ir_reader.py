"""Reads pytorch-ir's JSON: binds tensors and attributes to ATen parameter names, refuses what it cannot bind."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from npu_compiler.artifact.output_structure import read_structure
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.dtypes import dtype
from npu_compiler.errors import IRError
from npu_compiler.frontend.complex_pairs import spell_complex_as_pairs
from npu_compiler.frontend.evidence import Names, evidence_of
from npu_compiler.frontend.ir_source import IRSource, load_json, plain_node
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import bind, canonical
from npu_compiler.tensor.layout import BufferSpec, dense

__all__ = ["read_graph", "read_node"]

_MAX_ELEMENTS = 1 << 40
_WHOLE = frozenset({int})  # and no bool


def read_graph(source: IRSource) -> IRGraph:
    """Reads a whole model.

    Raises:
        IRError: Another schema, a dynamic shape, or a node that contradicts the rest.
        UnsupportedOpError: An op that the registry lacks, or an argument that it cannot bind.
    """
    data = spell_complex_as_pairs(load_json(source))
    name = _text(str(data.get("model_name") or "model"))
    tensors: dict[str, TensorSpec] = {}
    inputs = tuple(_declare(tensors, _field(data, "graph_inputs", list, "the IR"), "the graph's inputs"))
    if len(set(inputs)) != len(inputs):
        raise IRError(f"the IR names two inputs alike, among {reprlib.repr(inputs)}; extract the model again")
    weights = _read_weights(data, tensors)
    keys = {placeholder: recipe.inputs[0].name for placeholder, recipe in weights.items() if recipe.inputs}
    reader = _NodeReader(tensors, Names(inputs, keys))
    nodes = tuple(reader.read(raw, index) for index, raw in enumerate(_field(data, "nodes", list, "the IR")))
    outputs = tuple(_spec(raw, "the graph's outputs").name for raw in _field(data, "graph_outputs", list, "the IR"))
    written_for = dtype(data["compute_dtype"]) if "compute_dtype" in data else None
    notes = tuple(reader.assumptions)
    structure = read_structure(data.get("output_structure"), len(outputs))
    return IRGraph(name, inputs, outputs, weights, nodes, tensors, written_for, notes, structure).verify()


def read_node(raw: Any) -> tuple[OpNode, dict[str, TensorSpec]]:
    """Reads one node of an IR by itself, with the tensors it names: as JSON has it, or pytorch-ir's own object.

    Raises:
        IRError, UnsupportedOpError: As `read_graph`.
    """
    tensors: dict[str, TensorSpec] = {}
    raw = plain_node(raw)
    if not isinstance(raw, Mapping):
        raise IRError(f"given {raw!r:.60}, expected a node of an IR")
    where = f"node '{raw.get('name', '?')}'"
    inputs = _declare(tensors, _field(raw, "inputs", list, where), where)
    return _NodeReader(tensors, Names(inputs, {})).read(raw, 0), tensors


def _field(data: Mapping[str, Any], key: str, kind: type, where: str, tensor: str | None = None) -> Any:
    value = data.get(key)
    if not isinstance(value, kind):
        where = where if tensor is None else f"{where}, tensor '{tensor}'"
        given = "nothing" if value is None else f"a {type(value).__name__}"
        raise IRError(
            f"{where}: given {given} as '{key}', expected a {kind.__name__}; make the IR with npu_compiler.extract"
        )
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    """A name, if a program can hold it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise IRError(f"the IR: given the name {value!r:.60}, which is no Unicode text ({error.reason})") from error
    return value


def _spec(raw: Any, where: str) -> TensorSpec:
    if type(raw) is not dict and not isinstance(raw, Mapping):
        raise IRError(f"{where}: given {raw!r:.60}, expected a tensor with name, shape and dtype")
    name = _field(raw, "name", str, where)
    shape = _field(raw, "shape", list, where, name)
    if not _WHOLE.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise IRError(
            f"{where}, tensor '{name}': given the shape {shape}, expected sizes that are known when compiling; "
            "extract the model without dynamic_shapes"
        )
    if prod(shape) > _MAX_ELEMENTS:
        raise IRError(f"{where}, tensor '{name}': the shape {shape} has more than 2^40 elements")
    return TensorSpec(name, tuple(shape), dtype(_field(raw, "dtype", str, where, name)))


def _declare(tensors: dict[str, TensorSpec], raws: Iterable[Any], where: str) -> list[str]:
    specs = [_spec(raw, where) for raw in raws]
    tensors.update({spec.name: spec for spec in specs})
    return [spec.name for spec in specs]


def _read_weights(data: Mapping[str, Any], tensors: dict[str, TensorSpec]) -> dict[str, WeightRecipe]:
    """Declares each weight under the placeholder that nodes read; its recipe names the tensor of the weight file."""
    specs = {spec.name: spec for spec in (_spec(raw, "the weights") for raw in _field(data, "weights", list, "the IR"))}
    mapping = data.get("weight_name_mapping") or {}
    if not isinstance(mapping, Mapping):
        raise IRError("the IR: 'weight_name_mapping' is no object; make the IR with npu_compiler.extract")
    constants = data.get("constants") or {}
    if not isinstance(constants, Mapping):
        raise IRError("the IR: 'constants' is no object; make the IR with npu_compiler.extract")
    recipes: dict[str, WeightRecipe] = {}
    for placeholder, key in (mapping or {name: name for name in specs}).items():
        _text(str(placeholder))
        spec = specs.get(key) if isinstance(key, str) else None
        if spec is None:
            raise IRError(f"the IR maps '{placeholder}' to the weight '{key}', which it does not list; extract again")
        if placeholder in tensors:
            raise IRError(f"the IR names both an input and a weight '{placeholder}'; extract the model again")
        tensors[placeholder] = TensorSpec(placeholder, spec.shape, spec.dtype)
        buffer = BufferSpec(placeholder, spec.dtype, spec.dtype, dense(spec.shape))
        if key in constants:
            recipes[placeholder] = WeightRecipe(buffer, (), data=_constant_bytes(constants[key], spec))
        else:
            recipes[placeholder] = WeightRecipe(buffer, (WeightInput(key, spec.shape, spec.dtype.name),))
    return recipes


def _constant_bytes(raw: Any, spec: TensorSpec) -> bytes:
    """The elements of a constant that the IR carries, row-major."""
    values = raw.get("data") if isinstance(raw, Mapping) else raw
    try:
        array = np.asarray(values, dtype=spec.dtype.numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise IRError(
            f"constant '{spec.name}': its values are no {spec.dtype} numbers ({error}); extract again"
        ) from error
    if array.shape != spec.shape:
        raise IRError(f"constant '{spec.name}': given the shape {list(array.shape)}, declared as {list(spec.shape)}")
    return array.tobytes()


class _NodeReader:
    """Reads nodes in order; each declares what it makes.

    Attributes:
        assumptions: What was taken for absent where the IR does not say, in words.
    """

    def __init__(self, tensors: dict[str, TensorSpec], names: Names) -> None:
        self.assumptions: list[str] = []
        self._tensors, self._names = tensors, names

    def read(self, raw: Any, index: int) -> OpNode:
        """Reads one node; `index` is its place, for messages."""
        if not isinstance(raw, Mapping):
            raise IRError(f"node {index}: given {raw!r:.60}, expected an object; make the IR with npu_compiler.extract")
        name = _field(raw, "name", str, f"node {index}")
        where = f"node '{name}'"
        op = canonical(_field(raw, "op_type", str, where))
        given = _field(raw, "inputs", list, where)
        read = [self._operand(item, where, op) for item in given]
        attrs = _field(raw, "attrs", Mapping, where)
        outputs = [_spec(item, where) for item in _field(raw, "outputs", list, where)]
        bound = bind(name, op, read, attrs, evidence_of(name, op, read, attrs, outputs, self._tensors, self._names))
        self.assumptions += [bound.assumption] if bound.assumption else []
        for output in outputs:
            if output.name in self._tensors:
                raise IRError(
                    f"node '{name}' ({op}): its output '{output.name}' is made twice; extract the model again"
                )
            self._tensors[output.name] = output
        made = tuple(output.name for output in outputs)
        self._names.follow(op, read, made)
        return OpNode(name, op, bound.inputs, bound.attrs, made)

    def _operand(self, raw: Any, node: str, op: str) -> str:
        """The name of a tensor that a node reads, which was made as the node says."""
        name = raw.get("name") if type(raw) is dict or isinstance(raw, Mapping) else None
        declared = self._tensors.get(name) if isinstance(name, str) else None
        if declared is not None and raw.get("dtype") == declared.dtype.name and raw.get("shape") == [*declared.shape]:
            return declared.name
        operand, where = _spec(raw, node), f"{node} ({op})"
        if declared is None:
            raise IRError(
                f"{where} reads the tensor '{operand.name}', which no input, weight or earlier node makes; the IR "
                "is damaged or out of order, extract the model again"
            )
        if declared.shape != operand.shape or declared.dtype != operand.dtype:
            raise IRError(f"{where} reads '{operand}', but it was made as '{declared}'; extract the model again")
        return operand.name
