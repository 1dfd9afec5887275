"""Reads pytorch-ir's JSON: binds tensors and attributes to ATen parameter names, refuses what it cannot bind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.dtypes import dtype
from npu_compiler.errors import IRError
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.layout import BufferSpec, dense
from npu_compiler.ops.registry import bind, canonical
from npu_compiler.output_structure import read_structure
from npu_compiler.recipes import WeightInput, WeightRecipe

__all__ = ["IRSource", "load_json", "read_graph", "read_node"]

IRSource = str | os.PathLike[str] | Mapping[str, Any]
_MAX_ELEMENTS = 1 << 40


def load_json(source: IRSource) -> Mapping[str, Any]:
    """The IR as a mapping, from a path or from a mapping (which is returned as it is).

    Raises:
        IRError: The file cannot be read, is not JSON, or holds something other than an object.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise IRError(
            f"given a {type(source).__name__}, expected the path of an IR JSON file or the IR as a dict; a "
            "torch.nn.Module becomes one by npu_compiler.extract(model, inputs)"
        )
    try:
        data = json.loads(Path(source).read_bytes())
    except OSError as error:
        raise IRError(f"cannot read '{source}': {error.strerror}; give the path of an IR JSON file") from error
    except (ValueError, RecursionError) as error:
        raise IRError(f"'{source}' is not JSON ({error}); make one with npu_compiler.extract") from error
    if not isinstance(data, dict):
        raise IRError(
            f"'{source}' holds a {type(data).__name__}, expected an IR object; make one with npu_compiler.extract"
        )
    return data


def read_graph(source: IRSource) -> IRGraph:
    """Reads a whole model.

    Raises:
        IRError: Another schema, a dynamic shape, or a node that contradicts the rest.
        UnsupportedOpError: An op that the registry lacks, or an argument that it cannot bind.
    """
    data = load_json(source)
    name = str(data.get("model_name") or "model")
    tensors: dict[str, TensorSpec] = {}
    inputs = tuple(_declare(tensors, _field(data, "graph_inputs", list, "the IR"), "the graph's inputs"))
    weights = _read_weights(data, tensors)
    nodes = []
    for index, raw in enumerate(_field(data, "nodes", list, "the IR")):
        nodes.append(_read_node(raw, index, tensors))
    outputs = tuple(_spec(raw, "the graph's outputs").name for raw in _field(data, "graph_outputs", list, "the IR"))
    written_for = dtype(data["compute_dtype"]) if "compute_dtype" in data else None
    structure = read_structure(data.get("output_structure"), len(outputs))
    return IRGraph(name, inputs, outputs, weights, tuple(nodes), tensors, written_for, structure).verify()


def read_node(raw: Mapping[str, Any]) -> tuple[OpNode, dict[str, TensorSpec]]:
    """Reads one node of an IR by itself, with the tensors it names.

    Raises:
        IRError, UnsupportedOpError: As `read_graph`.
    """
    tensors: dict[str, TensorSpec] = {}
    if not isinstance(raw, Mapping):
        raise IRError(f"given {raw!r:.60}, expected a node of an IR")
    where = f"node '{raw.get('name', '?')}'"
    _declare(tensors, _field(raw, "inputs", list, where), where)
    return _read_node(raw, 0, tensors), tensors


def _field(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = data.get(key)
    if not isinstance(value, kind):
        given = "nothing" if value is None else f"a {type(value).__name__}"
        raise IRError(
            f"{where}: given {given} as '{key}', expected a {kind.__name__}; make the IR with npu_compiler.extract"
        )
    return value


def _spec(raw: Any, where: str) -> TensorSpec:
    if not isinstance(raw, Mapping):
        raise IRError(f"{where}: given {raw!r:.60}, expected a tensor with name, shape and dtype")
    name = _field(raw, "name", str, where)
    shape = _field(raw, "shape", list, f"{where}, tensor '{name}'")
    if any(type(size) is not int or size < 0 for size in shape):
        raise IRError(
            f"{where}, tensor '{name}': given the shape {shape}, expected sizes that are known when compiling; "
            "extract the model without dynamic_shapes"
        )
    if prod(shape) > _MAX_ELEMENTS:
        raise IRError(f"{where}, tensor '{name}': the shape {shape} has more than 2^40 elements")
    return TensorSpec(name, tuple(shape), dtype(_field(raw, "dtype", str, f"{where}, tensor '{name}'")))


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


def _read_node(raw: Any, index: int, tensors: dict[str, TensorSpec]) -> OpNode:
    if not isinstance(raw, Mapping):
        raise IRError(f"node {index}: given {raw!r:.60}, expected an object; make the IR with npu_compiler.extract")
    name = _field(raw, "name", str, f"node {index}")
    op = canonical(_field(raw, "op_type", str, f"node '{name}'"))
    operands = [_spec(item, f"node '{name}'") for item in _field(raw, "inputs", list, f"node '{name}'")]
    for operand in operands:
        declared = tensors.get(operand.name)
        if declared is None:
            raise IRError(
                f"node '{name}' ({op}) reads the tensor '{operand.name}', which no input, weight or earlier node "
                "makes; the IR is damaged or out of order, extract the model again"
            )
        if declared.shape != operand.shape or declared.dtype != operand.dtype:
            raise IRError(
                f"node '{name}' ({op}) reads '{operand}', but it was made as '{declared}'; extract the model again"
            )
    inputs, attrs = bind(name, op, [o.name for o in operands], dict(_field(raw, "attrs", Mapping, f"node '{name}'")))
    outputs = [_spec(item, f"node '{name}'") for item in _field(raw, "outputs", list, f"node '{name}'")]
    for output in outputs:
        if output.name in tensors:
            raise IRError(f"node '{name}' ({op}): its output '{output.name}' is made twice; extract the model again")
        tensors[output.name] = output
    return OpNode(name, op, inputs, attrs, tuple(output.name for output in outputs))
