"""Whether a node can run on a target: answered by lowering it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_compiler.codegen.planner import plan_graph
from npu_compiler.codegen.target import CodegenTarget, target_named
from npu_compiler.constraint_checker import check_constraints
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.graph_optimizer import assign_dtypes
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ir_reader import read_node

__all__ = ["Support", "is_op_supported", "lowers", "support_of"]


@dataclass(frozen=True)
class Support:
    """The answer; it is true where the node is supported. `reason` says what failed, and is empty where nothing did."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def is_op_supported(node: Any, target: str = "metal") -> Support:
    """Whether a node of an IR can run on a target: it is lowered to find out.

    Args:
        node: The node as its JSON object, or as pytorch-ir's own `OpNode`, which gives one by `to_dict()`.
        target: ``metal`` or ``cuda``.
    """
    try:
        parsed, tensors = read_node(
            node if isinstance(node, Mapping) or not hasattr(node, "to_dict") else node.to_dict()
        )
    except UnsupportedOpError as error:
        return Support(False, error.reason)
    except IRError as error:
        return Support(False, str(error))
    return support_of(parsed, tensors, target_named(target))


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
