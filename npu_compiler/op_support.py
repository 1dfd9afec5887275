"""Whether a node can run on a target: answered by lowering it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.frontend.ir_reader import read_node
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.lowering.constraint_checker import check_constraints
from npu_compiler.lowering.planner import plan_graph
from npu_compiler.lowering.target import CodegenTarget, target_named
from npu_compiler.ops.registry import canonical, definition
from npu_compiler.ops.registry import get_supported_ops as registered_ops

__all__ = ["Support", "get_supported_ops", "is_op_supported", "lowers", "support_of"]


@dataclass(frozen=True)
class Support:
    """The answer; it is true where the node is supported. `reason` says what failed, and is empty where nothing did."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def is_op_supported(node: Any, target: str | None = None) -> Support:
    """Whether a node of an IR can run on a target: it is lowered to find out.

    Args:
        node: The node as its JSON object, as pytorch-ir's own `OpNode`, or as a callback of `partition` gets it. Or an
            op's name: then the answer is whether some form of it lowers, and a node's shapes and attributes decide.
        target: As for `compile`.

    Raises:
        CompileError: There is no such target.
    """
    codegen = target_named(target)
    if not isinstance(node, Mapping) and hasattr(node, "to_dict") and not isinstance(node, type):
        node = node.to_dict()
    if isinstance(node, str):
        return _some_form(node)
    try:
        parsed, tensors = read_node(node)
    except UnsupportedOpError as error:
        return Support(False, error.reason)
    except IRError as error:
        return Support(False, str(error))
    return support_of(parsed, tensors, codegen)


def get_supported_ops(target: str | None = None) -> tuple[str, ...]:
    """The ATen names of the ops that run on a target in some form, sorted; `is_op_supported` of a node says it exactly.

    Raises:
        CompileError: There is no such target.
    """
    target_named(target)
    return registered_ops()  # what is registered lowers on every target: each op has its cases in the tests


def _some_form(name: str) -> Support:
    """Whether an op is registered, by its name with or without overload."""
    if definition(canonical(name)) or any(known.startswith(f"{name}.") for known in registered_ops()):
        return Support(True)
    near = get_close_matches(name, registered_ops(), n=3)
    meant = f"; near are {', '.join(near)}" if near else ""
    return Support(False, f"no definition of an op '{name}' is registered{meant}")


def support_of(node: OpNode, tensors: Mapping[str, TensorSpec], target: CodegenTarget) -> Support:
    """Whether a node can run on a target, as a graph of its own, in the data types that such a graph would get."""
    graph = _alone(node, tensors)
    kinds = {tensors[name].dtype for name in (*graph.inputs, *node.outputs)}
    if not kinds & {FLOAT16, BFLOAT16}:
        graph = assign_dtypes(graph, FLOAT16)
    return lowers(node, graph.tensors, target)


def lowers(node: OpNode, tensors: Mapping[str, TensorSpec], target: CodegenTarget) -> Support:
    """Whether a node can run on a target, given its tensors in the data types of the device."""
    graph = _alone(node, tensors)
    try:
        check_constraints(graph, target.storage_dtypes)
        dtypes = {name: spec.dtype for name, spec in graph.tensors.items()}
        plan_graph(graph, target, dtypes, {name: dtypes[name] for name in graph.outputs})
    except UnsupportedOpError as error:
        return Support(False, error.reason)
    except IRError as error:
        return Support(False, str(error))
    return Support(True)


def _alone(node: OpNode, tensors: Mapping[str, TensorSpec]) -> IRGraph:
    return IRGraph(node.name, tuple(dict.fromkeys(node.tensors())), node.outputs, {}, (node,), tensors)
