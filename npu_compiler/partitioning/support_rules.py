"""Who says whether a node can run on the device: the caller's function, or the target's own lowering."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from npu_compiler.errors import CompileError, IRError, UnsupportedOpError
from npu_compiler.ir import OpNode, TensorSpec
from npu_compiler.lowering.target import CodegenTarget
from npu_compiler.op_support import Support, lowers
from npu_compiler.ops.registry import bind
from npu_compiler.partitioning.placement import SupportRule

__all__ = ["NamedNode", "NodeCallback", "callback_rule", "target_rule"]


class _Fields(dict[str, Any]):
    """A JSON object whose fields are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no field '{name}', there are {', '.join(self)}") from None


class NamedNode(str):
    """A node as callbacks get it: the name of its op, with the fields of its JSON object.

    ``node in MY_OPS`` and ``node == "aten.relu.default"`` are about the op's name; ``node.name``, ``node.op_type``,
    ``node.inputs``, ``node.outputs`` and ``node.attrs`` are fields, as ``node["attrs"]`` and ``node.get("attrs")`` are.
    Tensors have ``name``, ``shape`` and ``dtype``.
    """

    _fields: dict[str, Any]

    def __new__(cls, op: str, fields: Mapping[str, Any]) -> NamedNode:
        node = super().__new__(cls, op)
        tensors = {key: [_Fields(tensor) for tensor in fields.get(key, ())] for key in ("inputs", "outputs")}
        node._fields = dict(fields) | tensors | {"attrs": fields.get("attrs") or {}}
        return node

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", {})
        if name not in fields:
            raise AttributeError(f"a node has no field '{name}', it has {', '.join(fields)}")
        return fields[name]

    def __getitem__(self, key: Any) -> Any:
        return self._fields[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """A field, or `default` where there is none."""
        return self._fields.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """The node's JSON object."""
        return dict(self._fields)


NodeCallback = Callable[[Any], Any]


def callback_rule(callback: NodeCallback, raw: Mapping[str, Mapping[str, Any]]) -> SupportRule:
    """Asks `callback` with the node, whose JSON object `raw` has by name."""

    def support(node: OpNode) -> Support:
        where = f"is_op_supported, called for node '{node.name}' ({node.op}),"
        try:
            answer = callback(NamedNode(node.op, raw[node.name]))
        except Exception as error:  # the caller's own function may raise anything
            raise CompileError(f"{where} raised {type(error).__name__}: {error}; expected True or False") from error
        if isinstance(answer, Support):
            return answer
        if not isinstance(answer, (bool, np.bool_)):
            raise CompileError(f"{where} returned {answer!r:.60}, expected True, False or a Support")
        return Support(bool(answer), "" if answer else "the callback refused it")

    return support


def target_rule(target: CodegenTarget, tensors: Mapping[str, TensorSpec]) -> SupportRule:
    """Lowers the node for `target`, with the model's tensors in the data types of the device."""
    accepted: set[str] = set()  # models repeat their layers: what lowered once lowers again

    def support(node: OpNode) -> Support:
        signature = _signature(node, tensors)
        if signature in accepted:
            return Support(True)
        names = list(node.tensors())
        try:
            bound = bind(node.name, node.op, names, node.attrs)
        except UnsupportedOpError as error:
            return Support(False, error.reason)
        except IRError as error:
            return Support(False, str(error))
        answer = lowers(OpNode(node.name, node.op, bound.inputs, bound.attrs, node.outputs), tensors, target)
        if answer:
            accepted.add(signature)
        return answer

    return support


def _signature(node: OpNode, tensors: Mapping[str, TensorSpec]) -> str:
    """Equal for nodes that differ in names alone."""
    names = list(node.tensors())
    shapes = [(names.index(name), tensors[name].shape, tensors[name].dtype.name) for name in names]
    made = [(tensors[name].shape, tensors[name].dtype.name) for name in node.outputs]
    return json.dumps([node.op, shapes, made, dict(node.attrs)], sort_keys=True, default=repr)
