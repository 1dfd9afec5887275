"""Reads an IR without binding its nodes, so that ops which no registry knows are carried along as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.artifact.output_structure import output_names, read_structure
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.dtypes import DType, dtype
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.frontend.complex_pairs import spell_complex_as_pairs
from npu_compiler.frontend.evidence import Names, evidence_of
from npu_compiler.frontend.ir_source import IRSource, load_json
from npu_compiler.graph.constants import read_no_shapes
from npu_compiler.graph.functional import functionalize
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import bind, canonical, definition
from npu_compiler.tensor.layout import BufferSpec, dense

__all__ = ["CarriedGraph", "entry", "read_carried_graph", "without_shared_memory"]

_REMEDY = "make the IR with npu_compiler.extract"


@dataclass(frozen=True)
class CarriedGraph:
    """A model whose nodes are not bound.

    Attributes:
        graph: The graph; a node's tensors go by their positions, "0", "1", and so on; its attributes are as written,
            and say None of optional tensors of which it had to be found out that they are absent.
        raw: The JSON object of each node by name.
        weight_keys: Name in the weight file of each weight that nodes read.
        constants: Values that the IR itself carries, by name in the weight file.
        outputs: Names that the caller knows the outputs by, in the order of `graph.outputs`.
    """

    graph: IRGraph
    raw: Mapping[str, Mapping[str, Any]]
    weight_keys: Mapping[str, str]
    constants: Mapping[str, Any]
    outputs: tuple[str, ...]


def read_carried_graph(source: IRSource) -> CarriedGraph:
    """Reads a whole model.

    Raises:
        IRError: Another schema, a dynamic shape, a name used twice, or a tensor that nothing makes.
    """
    data = spell_complex_as_pairs(load_json(source))
    tensors: dict[str, TensorSpec] = {}
    inputs = tuple(_declare(tensors, _items(data, "graph_inputs", "the IR"), "the graph's inputs"))
    keys = _weight_keys(data, tensors)
    nodes, raw, notes = [], {}, list[str]()
    names = Names(inputs, keys)
    for index, item in enumerate(_items(data, "nodes", "the IR")):
        node = _node(item, index, tensors)
        if node.name in raw:
            raise IRError(f"two nodes are called '{node.name}'; {_REMEDY}")
        node, note = _settled(node, tensors, names)
        nodes.append(node)
        notes += [note] if note else []
        raw[node.name] = item
    outputs = tuple(_spec(item, "the graph's outputs").name for item in _items(data, "graph_outputs", "the IR"))
    weights = {name: _recipe(tensors[name], key) for name, key in keys.items()}
    name = str(data.get("model_name") or "model")
    structure = read_structure(data.get("output_structure"), len(outputs))
    graph = IRGraph(
        name, inputs, outputs, weights, tuple(nodes), tensors, notes=tuple(notes), structure=structure
    ).verify()
    return CarriedGraph(graph, raw, keys, _mapping(data, "constants"), output_names(structure, outputs))


def without_shared_memory(carried: CarriedGraph) -> CarriedGraph:
    """The model without anything that changes in place (`npu_compiler.graph.functional`), or is read for its shape.

    Raises:
        UnsupportedOpError: As `functionalize`.
    """
    graph, raw, nodes = read_no_shapes(functionalize(carried.graph)), dict(carried.raw), []
    for node in graph.nodes:
        if node.name not in raw:
            read = list(node.tensors())
            node = replace(node, inputs={str(position): name for position, name in enumerate(read)})
            inputs, outputs = ([entry(graph.tensors[name]) for name in names] for names in (read, node.outputs))
            made = {"name": node.name, "op_type": node.op, "inputs": inputs, "outputs": outputs}
            raw[node.name] = {**made, "attrs": dict(node.attrs)}
        nodes.append(node)
    return replace(carried, graph=replace(graph, nodes=tuple(nodes)).verify(), raw=raw)


def entry(spec: TensorSpec, name: str = "") -> dict[str, Any]:
    """A tensor as an IR has it, under its own name or another."""
    return {"name": name or spec.name, "shape": list(spec.shape), "dtype": spec.dtype.name}


def _items(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise IRError(f"{where}: given a {type(value).__name__} as '{key}', expected a list; {_REMEDY}")
    return value


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise IRError(f"the IR: given a {type(value).__name__} as '{key}', expected an object; {_REMEDY}")
    return value


def _spec(item: Any, where: str) -> TensorSpec:
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        raise IRError(f"{where}: given {item!r:.60}, expected a tensor with name, shape and dtype; {_REMEDY}")
    name, shape, kind = item["name"], item.get("shape"), item.get("dtype")
    if not isinstance(shape, (list, tuple)) or any(type(size) is not int or size < 0 for size in shape):
        raise IRError(
            f"{where}, tensor '{name}': given the shape {shape!r:.60}, expected sizes that are known when compiling; "
            "extract the model without dynamic_shapes"
        )
    if not isinstance(kind, str):
        raise IRError(f"{where}, tensor '{name}': given the dtype {kind!r:.60}, expected its name; {_REMEDY}")
    return TensorSpec(name, tuple(shape), _dtype(kind))


def _dtype(name: str) -> DType:
    """The data type of that name; one that only the CPU knows, such as complex64, is carried too."""
    try:
        return dtype(name)
    except IRError:
        bits = re.search(r"\d+", name)
        if bits is None:
            raise
        return DType(name, max(1, int(bits.group()) // 8), _FOREIGN, 0, "")


_FOREIGN = 3  # a category beyond those that promotion knows


def _declare(tensors: dict[str, TensorSpec], items: Iterable[Any], where: str) -> list[str]:
    specs = [_spec(item, where) for item in items]
    tensors.update({spec.name: spec for spec in specs})
    return [spec.name for spec in specs]


def _weight_keys(data: Mapping[str, Any], tensors: dict[str, TensorSpec]) -> dict[str, str]:
    """Declares each weight under the name that nodes read; gives the names in the weight file."""
    specs = {spec.name: spec for spec in (_spec(item, "the weights") for item in _items(data, "weights", "the IR"))}
    keys = dict(_mapping(data, "weight_name_mapping")) or {name: name for name in specs}
    for placeholder, key in keys.items():
        if key not in specs:
            raise IRError(f"the IR maps '{placeholder}' to the weight '{key}', which it does not list; extract again")
        tensors[placeholder] = TensorSpec(placeholder, specs[key].shape, specs[key].dtype)
    return keys


def _recipe(spec: TensorSpec, key: str) -> WeightRecipe:
    buffer = BufferSpec(spec.name, spec.dtype, spec.dtype, dense(spec.shape))
    return WeightRecipe(buffer, (WeightInput(key, spec.shape, spec.dtype.name),))


def _node(item: Any, index: int, tensors: dict[str, TensorSpec]) -> OpNode:
    if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("name", "op_type")):
        raise IRError(f"node {index}: given {item!r:.60}, expected an object with name and op_type; {_REMEDY}")
    where = f"node '{item['name']}'"
    read = [_spec(operand, where).name for operand in _items(item, "inputs", where)]
    made = [_spec(output, where) for output in _items(item, "outputs", where)]
    for spec in made:
        if spec.name in tensors:
            raise IRError(f"{where}: its output '{spec.name}' is made twice; {_REMEDY}")
        tensors[spec.name] = spec
    inputs: dict[str, str | tuple[str, ...]] = {str(position): name for position, name in enumerate(read)}
    attrs = item.get("attrs") or {}
    if not isinstance(attrs, Mapping):
        raise IRError(f"{where}: given a {type(attrs).__name__} as 'attrs', expected an object; {_REMEDY}")
    return OpNode(item["name"], canonical(item["op_type"]), inputs, attrs, tuple(spec.name for spec in made))


def _settled(node: OpNode, tensors: Mapping[str, TensorSpec], names: Names) -> tuple[OpNode, str]:
    """The node with absent tensors as None where the IR leaves a choice, and what was assumed.

    A node that cannot be bound stays as it is: the target's rule says why, and the CPU binds it by PyTorch's schema.
    """
    read = list(node.tensors())
    outputs = [tensors[name] for name in node.outputs]
    given = (node.name, node.op, read, node.attrs)
    note = ""
    if definition(node.op) is not None:
        try:
            bound = bind(*given, evidence_of(*given, outputs, tensors, names))
        except (IRError, UnsupportedOpError):
            pass
        else:
            note = bound.assumption
            if note:
                node = replace(node, attrs={**node.attrs, **dict.fromkeys(bound.absent)})
    names.follow(node.op, read, node.outputs)
    return node, note
